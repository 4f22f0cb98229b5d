"""`kernel-builder build` and its alias `build-and-copy`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kernel_builder.cli.dependency_option import dependency_option
from kernel_builder.pipeline import BuildRequest, BuildSummary
from kernel_builder.pipeline import build as run_build
from kernel_builder.progress import shown

if TYPE_CHECKING:
    from kernel_builder.toolchain import Toolchains


def run(request: BuildRequest, toolchains: Callable[..., Toolchains]) -> BuildSummary:
    """Build, with progress on stderr.

    Args:
        toolchains: Makes the toolchains; `progress` is the argument for their downloads.
    """
    with shown(sys.stderr) as progress:
        return run_build(request, toolchains(progress=progress), progress)


def print_summary(summary: BuildSummary) -> None:
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
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    metavar="NUMBER",
    help="Compile only for this capability, such as 9.0; may be given again. For local use: upload refuses it.",
)
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
@dependency_option
@click.option("--index-url", metavar="URL", help="Package index. [default: the one pip or uv is set to use]")
@click.option("--offline", is_flag=True, help="Do not use the network; fail if something is missing.")
@click.option("--load/--no-load", default=True, help="Load each package that this machine can load.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def build(
    directories: tuple[Path, ...],
    variants: tuple[str, ...],
    backends: tuple[str, ...],
    whole: bool,
    capabilities: tuple[str, ...],
    out: Path | None,
    jobs: int | None,
    sccache: str,
    cuda_home: Path | None,
    cxx: str | None,
    dependencies: Mapping[str, Path],
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
    kernel-builder build . --capability 9.0
    """
    from kernel_builder.toolchain import Toolchains, compiler_cache

    summary = run(
        BuildRequest(
            directories=directories or (Path(),),
            variants=variants,
            backends=backends,
            whole=whole,
            capabilities=capabilities,
            out=out,
            jobs=jobs,
            compiler_cache=compiler_cache.find(sccache),
            load=load,
        ),
        partial(
            Toolchains,
            cuda_home=cuda_home,
            cxx=cxx,
            offline=offline,
            index_url=index_url,
            dependencies=dependencies,
        ),
    )
    if as_json:
        click.echo(json.dumps(summary.as_dict(), indent=2))
    else:
        print_summary(summary)


build_and_copy = click.Command(
    "build-and-copy", params=build.params, callback=build.callback, help="Another name for `build`."
)
