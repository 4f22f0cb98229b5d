"""A Hub for kernels: git repositories and large files, served by the API that the public clients use.

names.py             validation of names of repositories, refs and paths
refusals.py          error answers, in the form that the clients read
settings.py          settings and limits of a Hub
tokens.py            tokens and permissions
locks.py             locks between servers
turns.py             waiting for locks, without threads
blobs.py             files by name, in any store that fsspec supports
large_files.py       large files, named by their SHA-256
blob_spool.py        copies of git blobs for slow readers
allowances.py        quotas, and free space on the disk
git_command.py       how `git` is run
git_lock_files.py    git's own lock files
git_configuration.py values in a repository's configuration
git_ignore.py        what a .gitignore excludes
git_objects.py       values read from git and written to it
git_refs.py          branches, tags and pull requests of a repository
git_trees.py         files and folders of a revision
git_history.py       commits of a revision
git_commits.py       writing commits, merging pull requests
git_large_files.py   the large files that a repository owns
git_rewriting.py     a history without some large files
git_repository.py    one repository: all of the git_ modules together
repository_store.py  all repositories
repository_reader.py reading one repository for the index
repository_index.py  what lists need of all repositories, in SQLite
upstream.py          the other Hub of a mirror
mirror.py            copies of the other Hub's repositories
mirror_admission.py  which of its packages are served
mirror_downloads.py  large files that are being copied
hub_service.py       the state behind the routes
receive.py           request bodies, within limits of size and time
content.py           answers that carry a file
xet_format.py        the formats of Xet uploads
xet_hashes.py        the names of xorbs
routes/              the API and the web pages, one module a subject
audit_log.py         writes and denied accesses, one line each
metrics.py           metrics in Prometheus' format
app.py               the web application
serve.py             the server process
commands.py          `hub serve` and `hub token`
root_commands.py     `hub check` and `hub gc`
connections.py       connections, within limits
mend.py              `hub check`
retention.py         `hub gc`
"""

from importlib.metadata import version

__version__ = version("torch-kernel-hub")
