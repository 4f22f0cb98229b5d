"""A Hub for kernels: git repositories and large files, served by the API that the public clients use.

Modules import only from lines below their own; contracts of import-linter say the layers.

commands.py          `hub serve` and `hub token`
serve.py             the server process
root_commands.py     `hub check` and `hub gc`
app.py               the web application
mend.py              `hub check`
routes/              the API and the web pages, one module a subject
retention.py         `hub gc`
hub_service.py       the state behind the routes
mirror/              copies of another Hub's repositories
  copies.py          copies, made and kept up to date
  admission.py       which packages of the other Hub are served
  downloads.py       large files that are being copied
  upstream.py        the other Hub
http/                what surrounds every route
  connections.py     connections, within limits
  receive.py         request bodies, within limits of size and time
  turns.py           waiting for locks, without threads
  audit_log.py       writes and denied accesses, one line each
  metrics.py         metrics in Prometheus' format
tokens.py            tokens and permissions
repositories/        all repositories
  store.py           opened, created, renamed and deleted
  reader.py          reading one repository for the index
  allowances.py      quotas, and free space on the disk
  index.py           what lists need of them, in SQLite
xet/                 the formats of Xet uploads, and the names of xorbs
git/                 one repository
  blob_spool.py      copies of git blobs for slow readers
  repository.py      a repository: all of the modules below together
  commits.py         writing commits, merging pull requests
  rewriting.py       a history without some large files
  owned_files.py     the large files that a repository owns
  refs.py            branches, tags and pull requests
  history.py         commits of a revision
  tree_changes.py    the changes of a commit, applied to a tree
  trees.py           files and folders of a revision
  configuration.py   values in a repository's configuration
  lock_files.py      git's own lock files
  objects.py         values read from git and written to it
  ignore.py          what a .gitignore excludes
  command.py         how `git` is run
storage/             what is on the disk
  large_files.py     large files, named by their SHA-256
  blobs.py           files by name, in any store that fsspec supports
  locks.py           locks between servers
names.py             validation of names of repositories, refs and paths
settings.py          settings and limits of a Hub
refusals.py          error answers, in the form that the clients read
"""

from importlib.metadata import version

__version__ = version("torch-kernel-hub")
