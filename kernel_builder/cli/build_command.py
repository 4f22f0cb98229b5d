"""`kernel-builder build` and its alias `build-and-copy`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kernel_builder.pipeline import Listener, Request, Summary
from kernel_builder.pipeline import build as run_build

if TYPE_CHECKING:
    from rich.progress import TaskID

    from kernel_builder.toolchain import Toolchains


class _Lines(Listener):
    """Plain lines on stderr, for logs."""

    def planned(self, variants: int, binaries: int) -> None:
        self.say(f"{variants} variants, {binaries} binaries")

    def step(self, done: int, total: int, title: str) -> None:
        self.say(f"[{done}/{total}] {title}")

    def checking(self, name: str) -> None:
        self.say(f"checking {name}")

    def say(self, message: str) -> None:
        click.echo(message, err=True)


class _Bar(Listener):
    """A bar on a terminal. Shows nothing until there is something to show.

    Once the graph is planned nothing is fetched any more, and `fetching`, the display of downloads, is closed.
    """

    def __init__(self, stack: ExitStack, fetching: ExitStack) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task: TaskID | None = None
        self._fetching = fetching
        stack.callback(self._progress.stop)

    def planned(self, variants: int, binaries: int) -> None:
        self._fetching.close()

    def step(self, done: int, total: int, title: str) -> None:
        self._show(title, done, total)

    def checking(self, name: str) -> None:
        self._show(f"checking {name}", None, None)

    def say(self, message: str) -> None:
        self._progress.console.print(message, highlight=False)

    def _show(self, title: str, done: int | None, total: int | None) -> None:
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(title, total=total)
        self._progress.update(self._task, description=title, completed=done, total=total)


def run(request: Request, toolchains: Callable[..., Toolchains]) -> Summary:
    """Build, and show how it goes along on stderr.

    Args:
        toolchains: Makes the toolchains, given where to show their downloads, as `progress`.
    """
    from kernel_builder.progress import shown

    with ExitStack() as stack, ExitStack() as fetching:
        listener = _Bar(stack, fetching) if sys.stderr.isatty() else _Lines()
        return run_build(request, toolchains(progress=fetching.enter_context(shown(sys.stderr))), listener)


def print_summary(summary: Summary) -> None:
    """Print what a build did, for people."""
    rows = [("variant", "status", "size", "checks", "binary shared with")]
    for built in summary.packages:
        passed = f"{len(built.report.passed)} passed" if built.report else "passed"
        if built.report and built.report.skipped:
            passed += f", {len(built.report.skipped)} skipped"
        shares = f"{len(built.shares)} more" if len(built.shares) > 1 else "".join(built.shares)
        name = f"{built.project}/{built.variant}" if len({b.project for b in summary.packages}) > 1 else built.variant
        rows.append((name, built.status, f"{built.size / 1024:.0f} KiB", passed, shares))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for built in summary.packages:
        for finding in built.report.findings if built.report else ():
            click.secho(f"warning: {built.variant}: {finding.path}: {finding.message} ({finding.hint})", fg="yellow")
    for title, text in summary.warnings.items():
        click.secho(f"warnings from {title}:", fg="yellow", err=True)
        click.echo(text, err=True)
    for missing in summary.unavailable:
        click.secho(f"not built: {missing.variant}: {missing.reason}", fg="yellow")
        click.echo(f"    {missing.hint}")
    for name, backends in summary.skipped.items():
        click.secho(f"skipped: {name}: this builder does not compile for {', '.join(backends)}", fg="yellow")
    binaries = len({built.module for built in summary.packages})
    cost = "by a compiler cache" if summary.cpu_seconds is None else f"in {summary.cpu_seconds:.1f} s of processor time"
    click.echo(
        f"{len(summary.packages)} variants from {binaries} binaries; {summary.compiles} files compiled {cost}; "
        f"{summary.seconds:.1f} s in all"
    )


@click.command()
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--variant", "variants", multiple=True, metavar="NAME", help="Build exactly this variant; may be given again."
)
@click.option(
    "--backend", "backends", multiple=True, type=click.Choice(["cpu", "cuda"]), help="Build only for this backend."
)
@click.option("--all", "whole", is_flag=True, help="Build the whole matrix, not only what the Hub asks for.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write packages here instead of DIR/build.")
@click.option("-j", "--jobs", "--max-jobs", type=click.IntRange(min=1), help="Processors to use at most.")
@click.option(
    "--compiler-cache",
    "sccache",
    default="auto",
    show_default=True,
    metavar="auto|off|PROGRAM",
    help="An sccache to use, with the back ends it is configured for.",
)
@click.option("--cuda-home", type=click.Path(path_type=Path), help="A CUDA toolkit to use for its version of CUDA.")
@click.option("--cxx", metavar="PROGRAM", help="The g++ to use (default: $CXX, then g++).")
@click.option("--index-url", metavar="URL", help="Package index. [default: the one pip or uv is set to use]")
@click.option("--offline", is_flag=True, help="Do not use the network; fail if something is missing.")
@click.option("--load/--no-load", default=True, help="Load each package that this machine can load.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def build(
    directories: tuple[Path, ...],
    variants: tuple[str, ...],
    backends: tuple[str, ...],
    whole: bool,
    out: Path | None,
    jobs: int | None,
    sccache: str,
    cuda_home: Path | None,
    cxx: str | None,
    index_url: str | None,
    offline: bool,
    load: bool,
    as_json: bool,
) -> None:
    """Build the kernel projects in DIR (default: here).

    Every variant that the Hub asks for and this machine can build goes to DIR/build/<variant>/. What is missing of
    compilers and headers is downloaded once, pinned and verified; no Nix, GPU or CUDA installation is needed.

    \b
    kernel-builder build kernels/rmsnorm
    kernel-builder build kernels/* --backend cuda --jobs 4
    kernel-builder build . --variant torch214-cxx11-cu130-x86_64-linux
    """
    from kernel_builder.toolchain import Toolchains, compiler_cache

    summary = run(
        Request(
            directories=directories or (Path(),),
            variants=variants,
            backends=backends,
            whole=whole,
            out=out,
            jobs=jobs,
            compiler_cache=compiler_cache.find(sccache),
            load=load,
        ),
        partial(Toolchains, cuda_home=cuda_home, cxx=cxx, offline=offline, index_url=index_url),
    )
    if as_json:
        click.echo(json.dumps(summary.as_dict(), indent=2))
    else:
        print_summary(summary)


build_and_copy = click.Command(
    "build-and-copy", params=build.params, callback=build.callback, help="Another name for `build`."
)
