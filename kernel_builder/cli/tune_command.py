"""`kernel-builder tune`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kernel_aot import read_launch_function
from kernel_builder.aot import tuning
from kernel_builder.cli.shared_options import directory_argument, json_option
from kernel_builder.config import aot_toml
from kernel_builder.config.project_files import read_project
from kernel_builder.measure import workloads
from kernel_builder.measure.workloads import DTYPES
from kernel_builder.progress import shown
from kernel_format.errors import ConfigError, ToolchainError, VariantError


@click.command()
@directory_argument
@click.option("--op", "ops", multiple=True, metavar="NAME", help="Tune only this op of aot.toml; may be repeated.")
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), default=("bfloat16",), help="[default: bfloat16]"
)
@json_option
def tune(directory: Path, ops: Sequence[str], dtypes: Sequence[str], as_json: bool) -> None:
    """Choose the configurations of Triton kernels that are compiled ahead of time, on a GPU.

    DIR is a built project (default: here) with aot.toml. Each workload of DIR/benchmarks/benchmark.py runs with the
    Python package, and `triton.autotune` measures the configurations of its kernels. The fastest ones become rows of
    `config` in aot.toml, with conditions on the autotuner's key. It needs Torch, Triton and a GPU.

    \b
    kernel-builder tune my-kernel
    kernel-builder tune my-kernel --op softmax --json
    """
    path = directory / aot_toml.FILE
    if not path.is_file():
        raise ConfigError("does not exist; it declares the kernels to tune", where=str(path), hint="see docs/triton.md")
    declared = aot_toml.read(directory)
    chosen = {name: table for name, table in declared["op"].items() if not ops or name in ops}
    if unknown := set(ops) - set(chosen):
        raise ConfigError(f"{min(unknown)!r} is none of {', '.join(declared['op'])}", where="--op")
    package = _python_package(directory)
    parts = Path(declared["source"]).with_suffix("").parts[2:]  # after torch-ext/NAME
    module = importlib.import_module(".".join([package.__name__, *parts]))
    tuners = {name: _tuner(module, table["kernel"], f"{path}: [op.{name}]") for name, table in chosen.items()}
    launches: dict[str, list[tuning.Launch]] = {name: [] for name in chosen}
    with tuning.recording(tuners, launches):
        _run_workloads(directory, package, dtypes)
    tuned = {}
    for name, table in chosen.items():
        where = f"{path}: [op.{name}] config"
        if not launches[name]:
            raise ConfigError("no workload launches the kernel", where=where, hint="add one to benchmarks/benchmark.py")
        derived = read_launch_function(directory / declared["source"], name, table)
        tuned[name] = tuning.rows(launches[name], table.get("config", []), derived.get("passed", {}), where)
    tuning.write_rows(path, tuned)
    if as_json:
        found = {name: {"config": tuned[name], "launches": list(map(asdict, launches[name]))} for name in tuned}
        click.echo(json.dumps(found))
        return
    for name, rows in tuned.items():
        click.echo(f"{name}: {len(launches[name])} launches measured, {len(rows)} rows written to {path}")


def _python_package(directory: Path) -> Any:
    """Import the Python package of a built project, in which Triton compiles the kernels."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ToolchainError("Torch is not installed, and kernels run in it", hint="pip install torch") from error
    if not torch.cuda.is_available():
        message = "this machine's Torch finds no GPU, on which the configurations are measured"
        raise ToolchainError(message, hint="run it on a machine with a GPU, or write `config` in aot.toml yourself")
    initial = directory / "build" / "torch-cuda" / "__init__.py"
    if not initial.is_file():
        raise VariantError("is not built", where=str(initial.parent), hint=f"run `kernel-builder build {directory}`")
    try:
        return workloads.import_file(f"tuned_{read_project(directory).python_name}", initial)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ToolchainError("Triton is not installed, and measures the kernels", hint="pip install triton") from error


def _tuner(module: Any, kernel: str, where: str) -> Any:
    """Return a kernel's autotuner."""
    tuner: Any = getattr(module, kernel, None)
    if not hasattr(tuner, "configs"):
        raise ConfigError(
            f"{kernel} has no configurations to choose from",
            where=where,
            hint="add @triton.autotune(configs=[...], key=[...]) above @triton.jit",
        )
    if any(config.num_ctas > 1 for config in tuner.configs):
        raise ConfigError(
            f"{kernel} has configurations with num_ctas above 1, which are not compiled ahead of time",
            where=where,
            hint="remove them from @triton.autotune",
        )
    return tuner


def _run_workloads(directory: Path, package: Any, dtypes: Sequence[str]) -> None:
    from kernel_builder.measure.case import Case, tensors

    declared = workloads.load(directory)
    points = workloads.points(declared, "cuda", dtypes=dtypes)
    with shown(sys.stderr) as progress:
        for done, point in enumerate(points, 1):
            workload = workloads.make(declared[point.operation], package, "cuda", point.dtype)
            case = Case(workload, point.passes, point.shape)
            case.prepare(tensors(workload.eager(*case.inputs)))
            case.results(workload.ours)
            progress.advance("tuning", done, len(points), detail=str(point))
