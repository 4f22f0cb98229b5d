"""A Hub for kernels: git repositories and large files, served as the public clients expect.

names.py         what may be a repository, a ref, a path
refusals.py      every answer that is a refusal, in the clients' own terms
settings.py      how a Hub was started: where, for whom, how much
tokens.py        who may do what
blobs.py         named bytes, wherever fsspec reaches
large_files.py   large files, named by their SHA-256
repository.py    a git repository: refs, trees, commits
repositories.py  all of them: how they come and go
locks.py         locks between servers
hub.py           all of these together
receive.py       bodies as they stream in: limits, time-outs
content.py       the bytes of a file as an answer
xet.py           what newer clients' uploads are written in
routes/          the routes of the clients, and the pages for people: one file a subject
measures.py      what a running Hub counts
app.py           refusals, logs and measures around the routes
serve.py         sockets and the form of the log
mend.py          what `hub check` finds and mends
"""
