"""Load the workloads that a project declares in `benchmarks/benchmark.py`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_format.errors import ConfigError

DEVICES = ("cpu", "cuda")  # as Torch calls them: those that there is a clock for
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
    module = _import(path)
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


def _import(path: Path) -> Any:
    name = f"benchmark of {path.parent.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"cannot be imported: {type(error).__name__}: {error}", where=str(path)) from error
    return module
