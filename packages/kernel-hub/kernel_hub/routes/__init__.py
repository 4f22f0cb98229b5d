"""The routes of the Hub: the API of the public clients, and the web pages.

Paths and fields have the names that `huggingface_hub` and `kernels` use.
"""

from __future__ import annotations

from kernel_hub.routes import commits, git, lfs, pages, refs, repositories, revisions

_MODULES = (repositories, refs, revisions, commits, lfs, git, pages)
ROUTERS = (*(module.router for module in _MODULES), revisions.models)
