"""Skills for coding agents: texts that teach them to write kernels.

catalog          the format of a skill, and the built-in one
installation     the directories in which agents look for skills
benefit          how much a skill helps: searches with it and without it
distillation     a skill that an agent writes from a search
"""
