"""A Hub for kernels: git repositories and large files, served by the API that the public clients use.

Modules import only from lines below their own; contracts of import-linter say the layers.

commands.py          the command `kernel-hub`
serve.py             the server process
app.py               the web application
maintenance.py       `kernel-hub check` and `kernel-hub gc`
routes/              the API and the web pages, one module for each subject
hub_service.py       the state behind the routes
http/                middleware and request bodies
tokens.py            tokens and permissions
repositories/        all repositories
git/                 one repository
storage/             files on the disk
names.py             validation of names of repositories, refs and paths
settings.py          settings and limits of a Hub
refusals.py          error responses, in the form that the clients read
"""

from importlib.metadata import version

__version__ = version("torch-kernel-hub")
