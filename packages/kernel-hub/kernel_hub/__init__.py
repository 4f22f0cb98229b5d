"""A Hub for kernels: git repositories and large files, served by the API that the public clients use.

Modules import only from lines below their own; contracts of import-linter say the layers.

commands.py          the command `kernel-hub`
serve.py             the server process
app.py               the web application
repair.py            `kernel-hub check`
routes/              the API and the web pages, one module for each subject
retention.py         `kernel-hub gc`
hub_service.py       the state behind the routes
http/                middleware and request bodies
  receive.py         request bodies, within limits of size and time
  commit_body.py     the body of a commit
  audit_log.py       writes and denied accesses, one line each
  metrics.py         metrics in Prometheus' format
tokens.py            tokens and permissions
repositories/        all repositories
  store.py           opened, created, renamed and deleted
  reader.py          reading one repository for the index
  allowances.py      the quota, and free space on the disk
  index.py           the index for lists, in SQLite
git/                 one repository
  repository.py      a repository: all of the modules below together
  commits.py         writing commits, merging pull requests
  owned_files.py     the large files that a repository owns
  refs.py            branches, tags and pull requests
  new_objects.py     the objects of a change in progress
  tree_changes.py    the changes of a commit, applied to a tree
  revisions.py       files, folders and history of a revision
  configuration.py   values in a repository's configuration
  objects.py         values read from git and written to it
  ignore.py          the files that a .gitignore excludes
  command.py         running `git`
storage/             files on the disk
  large_files.py     large files, named by their SHA-256
  locks.py           locks between servers
  disk.py            durable writes, private files
names.py             validation of names of repositories, refs and paths
settings.py          settings and limits of a Hub
refusals.py          error responses, in the form that the clients read
"""

from importlib.metadata import version

__version__ = version("torch-kernel-hub")
