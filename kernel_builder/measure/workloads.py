"""The workloads that a project declares in `benchmarks/benchmark.py`, and the points that a run measures."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_builder.measure.results import Point, shape_name
from kernel_builder.plural import some_of
from kernel_format.errors import ConfigError

DEVICES = ("cpu", "cuda")  # as Torch calls them: those that there is a clock for
DTYPES = ("bfloat16", "float16", "float32")
PASSES = ("forward", "backward", "forward + backward")
_NEEDED = ("title", "small", "inputs", "ours", "eager")


def load(project: Path) -> Mapping[str, type[Any]]:
    """Return operation -> workload class, in the order of the file.

    Raises:
        ConfigError: If the file is missing or raises, or if it declares no workload or an incomplete one.
    """
    path = project / "benchmarks" / "benchmark.py"
    if not path.is_file():
        raise ConfigError(
            "does not exist; it must declare the workloads to measure",
            where=str(path),
            hint="see kernels/rmsnorm/benchmarks in the kernel-builder repository for an example",
        )
    try:
        module = import_file(f"benchmark of {project.name}", path)
    except Exception as error:
        raise ConfigError(f"cannot be imported: {type(error).__name__}: {error}", where=str(path)) from error
    own: list[Any] = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    workloads = {}
    for declared in own:
        if not getattr(declared, "shapes", None):
            continue
        missing = [name for name in _NEEDED if not hasattr(declared, name)]
        if missing:
            raise ConfigError(f"lacks {', '.join(missing)}", where=f"{path}: class {declared.__name__}")
        unknown = [name for name in declared.shapes if name not in PASSES]
        if unknown:
            raise ConfigError(
                f"has the pass {unknown[0]!r}; expected one of {', '.join(PASSES)}",
                where=f"{path}: class {declared.__name__}: shapes",
            )
        workloads[declared.title] = declared
    if not workloads:
        raise ConfigError(
            "declares no workload: a class with title, small, shapes, inputs, ours and eager",
            where=str(path),
            hint="copy workload.py from kernels/rmsnorm/benchmarks in the kernel-builder repository, and derive from "
            "its Workload",
        )
    return workloads


def make(workload: type[Any], kernel: Any, device: str, dtype: str) -> Any:
    """Instantiate a workload for a device ("cuda" or "cpu") and the name of a Torch dtype."""
    import torch

    instance = workload()
    instance.kernel = kernel
    instance.device = device
    instance.dtype = getattr(torch, dtype)
    return instance


def import_file(name: str, path: Path) -> Any:
    """Import a file as a module, or an `__init__.py` as a package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def selected(workloads: Mapping[str, type[Any]], wanted: Sequence[str]) -> dict[str, type[Any]]:
    """Return the workloads of the wanted operations, or all if none is named."""
    for name in wanted:
        if name not in workloads:
            raise ConfigError(f"{name!r} is none of {', '.join(workloads)}", where="--operation")
    return {name: workload for name, workload in workloads.items() if not wanted or name in wanted}


def points(
    workloads: Mapping[str, type[Any]],
    device: str,
    *,
    shapes: Sequence[str] = (),
    dtypes: Sequence[str] = ("bfloat16",),
) -> list[Point]:
    """Return the points to measure, in the order of the declarations.

    Args:
        shapes: A shape such as `1x4096x2048` is measured for each operation that takes as many sizes. A pattern such
            as `*x2048` selects the declared shapes that match. Empty for all that are declared.
    """
    for text in shapes:
        if not re.fullmatch(r"(\*|[1-9]\d*)(x(\*|[1-9]\d*))*", text):
            raise ConfigError(
                f"{text!r} is not a shape; expected sizes joined by x, like 1x4096x2048; * is any size",
                where="--shapes",
            )
    unused = dict.fromkeys(shapes)
    selected: dict[Point, None] = {}
    every: dict[tuple[int, ...], None] = {}
    for operation, workload in workloads.items():
        for name, declared in workload.shapes.items():
            chosen = here = [tuple(shape) for shape in declared.get(device, ())]
            every |= dict.fromkeys(here)
            if shapes:
                fitting = {text: _fitting(text, here, len(workload.small)) for text in shapes}
                chosen = [shape for each in fitting.values() for shape in each]
                unused = {text: None for text in unused if not fitting[text]}
            for dtype in dtypes:
                selected.update({Point(operation, name, shape, dtype): None for shape in chosen})
    if unused:
        listed = some_of(list(map(shape_name, every)), 6) or "none"
        message = f"{next(iter(unused))!r} fits no operation on {device}; they declare {listed}"
        raise ConfigError(message, where="--shapes")
    if not selected:
        raise ConfigError(f"no shape is declared for {device}", where="benchmarks/benchmark.py")
    return list(selected)


def _fitting(text: str, declared: Sequence[tuple[int, ...]], sizes: int) -> list[tuple[int, ...]]:
    """Return the declared shapes that match a pattern, or a shape itself if the operation takes as many sizes."""
    if "*" in text:
        return [shape for shape in declared if fnmatch.fnmatch(shape_name(shape), text)]
    shape = tuple(map(int, text.split("x")))
    return [shape] if len(shape) == sizes else []
