"""`kernel-builder benchmark`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from kernel_builder.cli.shared_options import directory_argument, table
from kernel_builder.measure import tables
from kernel_builder.measure.results import BenchmarkReport
from kernel_builder.measure.workloads import DEVICES, DTYPES
from kernel_builder.progress import shown
from kernel_format.errors import ToolchainError


def _items(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(item.strip() for item in value.split(",") if item.strip())


def _print(report: BenchmarkReport) -> None:
    click.echo(f"{report.kernel}, {report.variant}, on {tables.machine(report)}\n")
    shown = {
        f"{heading}: us a call (share of copy speed)": tables.times(rows)
        for heading, rows in tables.groups(report.rows)
    }
    if report.hosts:
        shown["host overhead: us a call"] = tables.hosts(report.hosts)
    if report.rows:
        shown["geometric means"] = tables.summary(report.rows)
    for heading, rows in shown.items():
        click.secho(heading, bold=True)
        table(rows)
        click.echo()
    for note in tables.notes(report):
        click.echo(note)


@click.command()
@directory_argument
@click.option(
    "--against",
    callback=_items,
    metavar="NAME,...",
    help="Peers to measure: eager, compile, and those that the project declares. [default: all]",
)
@click.option(
    "--operation", "operations", multiple=True, metavar="NAME", help="Measure only this operation; may be repeated."
)
@click.option(
    "--shapes",
    callback=_items,
    default="",
    metavar="SHAPE,...",
    help="1x4096x2048 is one shape, declared or not; *x2048 is the declared shapes that match. [default: declared]",
)
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), default=("bfloat16",), help="[default: bfloat16]"
)
@click.option("--backend", "device", type=click.Choice(DEVICES), help="[default: cuda if there is a GPU]")
@click.option("--rounds", type=click.IntRange(min=3), default=21, show_default=True, help="Samples of each time.")
@click.option(
    "--only",
    type=click.Choice(["device", "host"]),
    help="Measure only device times, or only host overhead. [default: both]",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Save the results to FILE, after each row.",
)
def benchmark(directory: Path, json_file: Path | None, **options: Any) -> None:
    """Measure a built kernel and compare it with its peers.

    DIR is the project (default: here), and DIR/benchmarks/benchmark.py declares the operations and shapes. Each result
    is first compared with float64. A kernel whose error exceeds eager PyTorch's by more than 10 % gets no time, and the
    exit status is 1. Then all implementations are timed in turn, on tensors that are not in a cache; on a GPU this is
    device time, from replays of CUDA graphs. A device-to-device copy of the same number of bytes is timed in the
    same rounds: speeds are given as a share of copy speed, which a memory-bound kernel can reach, and exceed a little.

    \b
    kernel-builder benchmark kernels/rmsnorm --against compile,liger --shapes 1x4096x2048,*x*x128
    kernel-builder benchmark kernels/rmsnorm --json rmsnorm.json
    """
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)  # its errors come before the measurements
    try:
        from kernel_builder.measure.run import run
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "Torch is not installed, and kernels run in it"
        raise ToolchainError(message, hint="pip install torch") from error
    command = shlex.join(["kernel-builder", *sys.argv[1:]])
    with shown(sys.stderr) as progress:
        report = run(directory, command=command, json_file=json_file, progress=progress, **options)
    _print(report)
    if report.wrong():
        sys.exit(1)
