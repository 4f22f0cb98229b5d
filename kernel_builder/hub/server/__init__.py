"""A Hub for kernels: git repositories and large files, served as the public clients expect.

names.py         what may be a repository, a ref, a path
refusals.py      every answer that is a refusal, in the clients' own terms
tokens.py        who may do what
large_files.py   large files, named by their SHA-256
repositories.py  git repositories: refs, trees, commits
receive.py       bodies as they stream in: limits, time-outs, digests
api.py           the routes of the clients
xet.py           the upload protocol of newer clients
pages.py         the pages for people
serve.py         sockets, logs, metrics
mend.py          what `hub check` finds and mends
"""
