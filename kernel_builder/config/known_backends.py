"""The back ends that `build.toml` and the names of variants may say, found by name.

A back end is a value in a file of its own, in `kernel_builder/backends/` or in a package that registers it under the
entry point group `kernel_builder.backends`. Both are named here as `module:value` and imported when they are first
asked for, so this module depends on none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points

from kernel_builder.config.project import Backend
from kernel_format.errors import ToolchainError

GROUP = "kernel_builder.backends"

_RECOGNIZED = "kernel_builder.backends.recognized"
_BUILT_IN: Mapping[str, str] = {
    "cann": f"{_RECOGNIZED}:CANN",
    "cpu": "kernel_builder.backends.cpu:CPU",
    "cuda": "kernel_builder.backends.cuda:CUDA",
    "metal": f"{_RECOGNIZED}:METAL",
    "neuron": f"{_RECOGNIZED}:NEURON",
    "rocm": "kernel_builder.backends.rocm:ROCM",
    "tpu": f"{_RECOGNIZED}:TPU",
    "xpu": f"{_RECOGNIZED}:XPU",
}
# Back ends that the builder compiles for. Entry points are not looked up for these: that takes 60 ms.
COMPILED = ("cpu", "cuda", "rocm")
NAMES = tuple(_BUILT_IN)


def find(name: str) -> Backend | None:
    """Return the back end of this name, or None.

    One that is registered replaces one that is recognized only.

    Raises:
        ToolchainError: If a registered back end cannot be imported.
    """
    place = (None if name in COMPILED else _registered().get(name)) or _BUILT_IN.get(name)
    return _load(place) if place else None


def get(name: str) -> Backend:
    """Return the back end of a name that has been checked."""
    backend = find(name)
    assert backend, name
    return backend


def named(variant: str) -> Backend | None:
    """Return the back end that the name of a variant says, also one that the builder does not compile for."""
    parts = variant.split("-")
    known = next(
        (known for known in of_format() if known.name in parts or any(map(known.is_spelled, parts))),
        None,
    )
    return get(known.name) if known else None


def names(mentioned: Iterable[object] = ()) -> tuple[str, ...]:
    """Return the names of all back ends, sorted; registered ones only if a name is mentioned that is not built in."""
    has_others = any(isinstance(name, str) and name not in _BUILT_IN for name in mentioned)
    return tuple(sorted({*NAMES, *_registered()})) if has_others else NAMES


def of_format(mentioned: Collection[object] = ()) -> tuple[Backend, ...]:
    """Return the back ends of these `names`. One that replaces a built-in one is among them only if it is mentioned."""
    return tuple(
        get(name) if name in mentioned or name not in _BUILT_IN else _load(_BUILT_IN[name]) for name in names(mentioned)
    )


def compiled_for() -> Iterator[Backend]:
    """Yield the back ends that the builder compiles for, registered ones last: they are looked up only if reached."""
    yield from map(get, COMPILED)
    yield from (backend for name in sorted(_registered()) if name not in COMPILED and (backend := get(name)).compiles)


@cache
def _registered() -> Mapping[str, str]:
    return {point.name: point.value for point in entry_points(group=GROUP)}


@cache
def _load(place: str) -> Backend:
    module, _, value = place.partition(":")
    try:
        backend = getattr(importlib.import_module(module), value)
        if not isinstance(backend, Backend):
            raise TypeError(f"{value} is {backend!r}, and not a Backend")
        return backend
    except Exception as error:  # of whatever package
        raise ToolchainError(
            f"this back end cannot be imported: {error}",
            where=f"entry point {place} of {GROUP}",
            hint="install the package that registers it again, or uninstall it",
        ) from error
