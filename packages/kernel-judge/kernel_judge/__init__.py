"""A judge of kernels that trusts no candidate, and searches by agents.

judge/        a task and a candidate -> a verdict: workers, their sandbox, comparison with float64, timing beside peers
search/       a task and agents -> verdicts in a log -> the best kernel as a project, and reports of searches
leaderboard/  signed results -> a page with ranks, rooflines and code
cli/          the commands that `kernel-builder` has when this package is installed
api.py        searches for other programs
"""
