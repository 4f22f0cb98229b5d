"""The routes of the Hub: the API of the public clients, and the web pages.

Paths and fields have the names that `huggingface_hub` and `kernels` use.
"""

from __future__ import annotations

from kernel_hub.routes import accounts, commits, git, lfs, pages, refs, repositories, revisions

ROUTERS = tuple(module.router for module in (accounts, repositories, refs, revisions, commits, lfs, git, pages))
