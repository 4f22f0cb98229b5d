"""The back ends that `build.toml` and the names of variants may have, found by name.

A back end is a value of a module in `kernel_builder/backends/`. The modules are imported when they are first used, so
this module depends on none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache

from kernel_builder.config.project import Backend

# Name -> its module and its value in `kernel_builder.backends`.
_PLACES: Mapping[str, tuple[str, str]] = {
    "cann": ("recognized", "CANN"),
    "cpu": ("cpu", "CPU"),
    "cuda": ("cuda", "CUDA"),
    "metal": ("recognized", "METAL"),
    "neuron": ("recognized", "NEURON"),
    "rocm": ("rocm", "ROCM"),
    "tpu": ("recognized", "TPU"),
    "xpu": ("recognized", "XPU"),
}
NAMES = tuple(_PLACES)
COMPILED = ("cpu", "cuda", "rocm")
# Those of `[kernel.<name>]` tables.
WITH_KERNELS = ("cpu", "cuda", "metal", "rocm", "xpu")


@cache
def get(name: str) -> Backend:
    """Return the back end of a name in `NAMES`."""
    module, value = _PLACES[name]
    backend = getattr(importlib.import_module(f"kernel_builder.backends.{module}"), value)
    assert isinstance(backend, Backend)
    return backend


def compiled_for() -> tuple[Backend, ...]:
    """Return the back ends that the builder compiles for."""
    return tuple(map(get, COMPILED))


def named(variant: str) -> Backend | None:
    """Return the back end in a variant's name, also one that the builder does not compile for."""
    parts = variant.split("-")
    every = map(get, NAMES)
    return next((backend for backend in every if backend.name in parts or any(map(backend.is_spelled, parts))), None)
