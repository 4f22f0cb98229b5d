"""Select the operations, shapes and dtypes that a run measures."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kernel_builder.measure.results import Point, shape_name
from kernel_builder.plural import some_of
from kernel_format.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")


def operations(workloads: Mapping[str, type[Any]], wanted: Sequence[str]) -> dict[str, type[Any]]:
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
        workloads: Operation -> its workload.
        device: "cuda" or "cpu".
        shapes: A shape such as `1x4096x2048` is measured for each operation that takes as many sizes. A pattern such
            as `*x2048` selects the declared shapes that match. Empty for all that are declared.
        dtypes: Names of Torch dtypes.
    """
    wanted = [_parse(text) for text in shapes]
    used: set[tuple[str, ...]] = set()
    selected: dict[Point, None] = {}
    for operation, workload in workloads.items():
        for name, declared in workload.shapes.items():
            here = [tuple(shape) for shape in declared.get(device, ())]
            chosen = here
            if wanted:
                chosen = []
                for pattern in wanted:
                    fitting = list(_fitting(pattern, here, len(workload.small)))
                    chosen += fitting
                    used.update([pattern] if fitting else [])
            for dtype in dtypes:
                selected.update({Point(operation, name, shape, dtype): None for shape in chosen})
    for pattern in wanted:
        if pattern not in used:
            sizes = sorted({len(workload.small) for workload in workloads.values()})
            raise ConfigError(
                f"{'x'.join(pattern)!r} fits no operation on {device}; they take "
                f"{' or '.join(map(str, sizes))} sizes, and declare {_some(workloads, device)}",
                where="--shapes",
            )
    if not selected:
        raise ConfigError(f"no shape is declared for {device}", where="benchmarks/benchmark.py")
    return list(selected)


def _parse(text: str) -> tuple[str, ...]:
    sizes = tuple(text.strip().split("x"))
    if not all(re.fullmatch(r"\*|[1-9]\d*", size) for size in sizes):
        raise ConfigError(
            f"{text.strip()!r} is not a shape; expected sizes joined by x, like 1x4096x2048; * is any size",
            where="--shapes",
        )
    return sizes


def _fitting(pattern: tuple[str, ...], declared: Sequence[tuple[int, ...]], sizes: int) -> Iterator[tuple[int, ...]]:
    if "*" not in pattern:
        return iter([tuple(map(int, pattern))] if len(pattern) == sizes else [])
    return (
        shape
        for shape in declared
        if len(shape) == len(pattern) and all(map(fnmatch.fnmatch, map(str, shape), pattern))
    )


def _some(workloads: Mapping[str, type[Any]], device: str) -> str:
    shapes = {
        shape_name(shape): None
        for workload in workloads.values()
        for declared in workload.shapes.values()
        for shape in declared.get(device, ())
    }
    return some_of(list(shapes), 6) or "none"
