"""`kernel-builder benchmark`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernel_builder.errors import ToolchainError
from kernel_builder.measure import plot, tables
from kernel_builder.measure.results import COPY, OURS, Report, Row
from kernel_builder.measure.selection import DTYPES
from kernel_builder.measure.workloads import PASSES

if TYPE_CHECKING:
    from kernel_builder.measure.run import Listener

_FILE = click.Path(dir_okay=False, path_type=Path)


def _items(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(item.strip() for item in value.split(",") if item.strip())


def _lines() -> Listener:
    from kernel_builder.measure.run import Listener

    class Lines(Listener):
        """Plain lines on stderr."""

        def compiled(self, done: int, total: int) -> None:
            if done == total:
                click.echo(f"peers are compiled for {total} places", err=True)

        def measured(self, done: int, total: int, row: Row) -> None:
            click.echo(f"[{done}/{total}] {row.place}: {_verdict(row)}", err=True)

    return Lines()


def _verdict(row: Row) -> str:
    if OURS in row.faults:
        return f"WRONG, not timed: {row.faults[OURS]}"
    if OURS not in row.times:
        return "not timed"
    return f"{row.times[OURS].median * 1e6:.3g} us, a copy {row.times[COPY].median * 1e6:.3g}"


def _print(report: Report) -> None:
    click.echo(f"{report.kernel}, {report.variant}, on {tables.machine(report)}\n")
    for heading, rows in tables.groups(report.rows):
        click.secho(f"{heading}: us of a call (beside a copy of as many bytes)", bold=True)
        click.echo(tables.as_text(tables.times(rows)) + "\n")
    if report.hosts:
        click.secho("us of the host for a call", bold=True)
        click.echo(tables.as_text(tables.hosts(report.hosts)) + "\n")
    if report.rows:
        click.secho("geometric means", bold=True)
        click.echo(tables.as_text(tables.summary(report.rows)) + "\n")
    for note in tables.notes(report):
        click.echo(note)


@click.command()
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
@click.option(
    "--against",
    callback=_items,
    metavar="NAME,...",
    help="Peers: eager, compile, and those that the project declares. [default: all]",
)
@click.option("--operation", "operations", multiple=True, metavar="NAME", help="Only this one; may be given again.")
@click.option("--pass", "passes", multiple=True, type=click.Choice(PASSES), help="Only this one; may be given again.")
@click.option(
    "--shapes",
    callback=_items,
    metavar="SHAPE,...",
    help="1x4096x2048: this shape, declared or not. With * for sizes: the declared ones that fit. [default: declared]",
)
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), default=("bfloat16",), help="[default: bfloat16]"
)
@click.option("--backend", type=click.Choice(["cpu", "cuda"]), help="[default: cuda, where there is a GPU]")
@click.option("--rounds", type=click.IntRange(min=3), default=21, show_default=True, help="Samples of each time.")
@click.option(
    "--only",
    type=click.Choice(["device", "host"]),
    help="Leave out what calls cost the host, or measure nothing else. [default: both]",
)
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), help="Processes that compile for torch.compile. [default: processors]"
)
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write all that was measured, after each row.")
@click.option("--plot", "plot_file", type=_FILE, metavar="FILE", help="Draw the shares of a copy's speed, as SVG.")
@click.option("--from", "source", type=_FILE, metavar="FILE", help="Measure nothing; show what --json wrote.")
def benchmark(
    directory: Path,
    against: tuple[str, ...] | None,
    operations: tuple[str, ...],
    passes: tuple[str, ...],
    shapes: tuple[str, ...] | None,
    dtypes: tuple[str, ...],
    backend: str | None,
    rounds: int,
    only: str | None,
    jobs: int | None,
    json_file: Path | None,
    plot_file: Path | None,
    source: Path | None,
) -> None:
    """Measure the built kernel of the project in DIR (default: here) beside its peers.

    DIR/benchmarks/benchmark.py declares the operations and shapes. First each result is held against float64: where
    its error exceeds that of eager PyTorch by more than a tenth, no time is shown, and the command ends with 1. Then
    all implementations are timed in turn, on tensors that no cache holds: on a GPU the device's own time, from CUDA
    graphs. A copy of as many bytes as the operation must read and write is timed with them: as fast as it is can a
    kernel hope to be, and the share of its speed is in brackets.

    \b
    kernel-builder benchmark kernels/rmsnorm
    kernel-builder benchmark kernels/rmsnorm --against compile,liger --shapes 1x4096x2048,*x*x128
    kernel-builder benchmark kernels/rmsnorm --json rmsnorm.json --plot rmsnorm.svg
    kernel-builder benchmark --from rmsnorm.json
    """
    if source:
        report = Report.read(source)
    else:
        report = _measure(
            project=directory,
            command=shlex.join(["kernel-builder", *sys.argv[1:]]),
            device=backend,
            operations=operations,
            passes=passes,
            shapes=shapes or (),
            dtypes=dtypes,
            against=against,
            rounds=rounds,
            only=only,
            jobs=jobs,
            json=json_file,
        )
    _print(report)
    if plot_file:
        plot_file.write_text(plot.draw(report), encoding="utf-8")
    if report.wrong():
        sys.exit(1)


def _measure(**arguments: Any) -> Report:
    try:
        from kernel_builder.measure.run import Request, run
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ToolchainError("Torch is not installed, and kernels run in it", hint="pip install torch") from error
    return run(Request(**arguments), _lines())
