"""Device times of clang's builds of kernels beside nvcc's, in one process: the same points, interleaved rounds.

    kernel-builder build kernels/* --backend cuda --cuda-compiler nvcc --out packages/nvcc
    kernel-builder build kernels/* --backend cuda --cuda-compiler clang --out packages/clang
    python benchmarks/cuda_compilers.py kernels/rmsnorm kernels/adaln --packages packages \\
        --json benchmarks/results/cuda-compilers.json

The ratio of a point is nvcc's time divided by clang's: above 1, clang's build is faster. The packages of CUDA 13 are
measured; those of CUDA 12 have the same binary where clang compiles both.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from kernels import get_local_kernel

from kernel_builder.measure import workloads
from kernel_builder.measure.case import measure
from kernel_builder.measure.results import OURS, Row, as_json, geometric_mean
from kernel_builder.measure.selection import operations, points
from kernel_builder.measure.timing import clock

COMPILERS = ("clang", "nvcc")


def rows(project: Path, packages: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure the declared points of a project; clang's build is `OURS`."""
    device = arguments.device
    kernels = {name: get_local_kernel(packages / name / project.name, backend=device) for name in COMPILERS}
    chosen = workloads.load(project)
    if arguments.operation:
        chosen = operations(chosen, [name for name in arguments.operation if name in chosen])
    shapes = [shape for shape in arguments.shapes.split(",") if shape]
    timer = clock(device)
    for point in points(chosen, device, shapes=shapes, dtypes=(arguments.dtype,)):
        workload = workloads.make(chosen[point.operation], kernels["clang"], device, point.dtype)
        torch.manual_seed(42)
        row = Row(point)
        functions = {OURS: ours_of(workload, kernels["clang"]), "nvcc": ours_of(workload, kernels["nvcc"])}
        measure(workload, row, functions, timer, arguments.rounds)
        yield row
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def ours_of(workload: Any, kernel: Any) -> Callable[..., Any]:
    """Return the workload's `ours` for a kernel. One workload serves both builds: `inputs` leaves values in it."""

    def ours(*inputs: torch.Tensor) -> Any:
        workload.kernel = kernel
        return workload.ours(*inputs)

    return ours


def entry(project: Path, row: Row) -> dict[str, Any]:
    point = row.point
    measured: dict[str, Any] = {
        "kernel": project.name,
        "operation": point.operation,
        "pass": point.passes,
        "shape": list(point.shape),
        "dtype": point.dtype,
    }
    if row.faults:
        return {**measured, "faults": row.faults}
    times = {"clang": row.times[OURS], "nvcc": row.times["nvcc"]}
    measured |= {f"{name}_us": round(time.median * 1e6, 3) for name, time in times.items()}
    return {**measured, "ratio": round(row.ratios["nvcc"].median, 4)}


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return kernel, operation and pass -> the geometric mean and the least of the ratios."""
    groups: dict[str, list[float]] = {}
    for point in entries:
        if "ratio" in point:
            groups.setdefault(f"{point['kernel']}: {point['operation']}, {point['pass']}", []).append(point["ratio"])
            groups.setdefault(f"{point['kernel']}: all", []).append(point["ratio"])
    return {
        name: {
            "points": len(ratios),
            "geometric_mean": round(geometric_mean(ratios), 4),
            "least": round(min(ratios), 4),
        }
        for name, ratios in groups.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("projects", type=Path, nargs="+")
    parser.add_argument("--packages", type=Path, required=True, help="has nvcc/KERNEL/VARIANT and clang/KERNEL/VARIANT")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the script")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--operation", action="append", default=[])
    parser.add_argument("--shapes", default="", help="as of `kernel-builder benchmark`")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    entries = []
    for project in arguments.projects:
        for row in rows(project, arguments.packages, arguments):
            entries.append(entry(project, row))
            print(json.dumps(entries[-1]), flush=True)
            if arguments.json:
                device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
                report = {"device": device, "torch": torch.__version__, "command": " ".join(sys.argv)}
                report |= {"summary": summary(entries), "points": entries}
                arguments.json.write_text(as_json(report))
    print(json.dumps(summary(entries), indent=1))


if __name__ == "__main__":
    main()
