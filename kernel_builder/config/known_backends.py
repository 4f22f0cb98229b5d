"""The back ends that `build.toml` and the names of variants may have, found by name.

A back end that the builder compiles for is a value of a module in `kernel_builder/backends/`. The modules are imported
when they are first used, so this module depends on none of them. For others, it makes Python-only packages.
"""

from __future__ import annotations

import importlib
from dataclasses import asdict
from functools import cache

from kernel_builder.config.project import Backend
from kernel_format.variant import BACKENDS

_SPELLINGS = {spelling.name: spelling for spelling in BACKENDS}
NAMES = tuple(_SPELLINGS)
COMPILED = ("cpu", "cuda", "rocm")  # each is a value of its name, in upper case, in its module
# The others of `[kernel.<name>]` tables, and why the builder does not compile for them.
_NOT_COMPILED = {
    "metal": "Metal's compiler is Apple's and runs on macOS only; Python with torch.mps.compile_shader in a "
    "[torch-noarch] project needs none",
    "xpu": "the package index has Intel's runtime and no SYCL compiler",
}
WITH_KERNELS = tuple(sorted([*COMPILED, *_NOT_COMPILED]))


@cache
def get(name: str) -> Backend:
    """Return the back end of a name in `NAMES`."""
    if name in COMPILED:
        backend = getattr(importlib.import_module(f"kernel_builder.backends.{name}"), name.upper())
        assert isinstance(backend, Backend)
        return backend
    why_not = _NOT_COMPILED.get(name, "build.toml has no compiled kernels for it")
    return Backend(**asdict(_SPELLINGS[name]), why_not=why_not, torch_version="xpu" if name == "xpu" else "")


def compiled_for() -> tuple[Backend, ...]:
    """Return the back ends that the builder compiles for."""
    return tuple(map(get, COMPILED))


def named(variant: str) -> Backend | None:
    """Return the back end in a variant's name, also one that the builder does not compile for."""
    parts = variant.split("-")
    every = map(get, NAMES)
    return next((backend for backend in every if backend.name in parts or any(map(backend.is_spelled, parts))), None)
