"""A judge of kernels that trusts no candidate, searches by agents, and skills that teach agents to write kernels.

judge/    a task and a candidate -> a verdict: workers, their sandbox, comparison with float64, timing beside peers
search/   a task and agents -> verdicts in a log -> the best kernel as a project, and reports of searches
skills/   texts for coding agents, where they are installed, and how much they help
cli/      the commands that `kernel-builder` has when this package is installed
"""
