"""`kernel-builder build` and its alias `build-and-copy`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kernel_builder.checks.findings import CheckReport, summary_lines
from kernel_builder.cli import report_error
from kernel_builder.cli.shared_options import (
    allow_option,
    json_option,
    load_option,
    owner_option,
    print_reasons,
    selection_options,
    table,
    toolchain_options,
)
from kernel_builder.config.variant import PLATFORMS
from kernel_builder.pipeline import BuildRequest, BuildSummary
from kernel_builder.pipeline import build as run_build
from kernel_builder.plural import counted
from kernel_builder.progress import Progress, shown
from kernel_builder.toolchain import Toolchains
from kernel_format.cache_directory import shared_cache

_ERRORS = 5  # printed in full


def run(request: BuildRequest, toolchains: Callable[[Progress], Toolchains]) -> BuildSummary:
    """Build, with progress on stderr. `toolchains` creates the toolchains, which report their downloads there."""
    with shown(sys.stderr) as progress:
        return run_build(request, toolchains(progress), progress)


def print_summary(summary: BuildSummary) -> None:
    """Print the result of a build: warnings, errors, then one table."""
    reports: dict[str, dict[str, CheckReport]] = {}
    for built in summary.packages:
        if built.checks:
            reports.setdefault(built.project, {})[built.variant] = built.checks
    for project, project_reports in reports.items():
        for line in summary_lines(project_reports, "warning", f"`kernel-builder check-builds {project}` lists all"):
            click.secho(line if line.startswith(" ") else f"warning: {project}: {line}", fg="yellow")
    for title, text in summary.warnings.items():
        click.secho(f"warnings from {title}:", fg="yellow", err=True)
        click.echo(text, err=True)
    for error in summary.errors[:_ERRORS]:
        report_error(error, as_json=False)
    if summary.errors[_ERRORS:]:
        click.echo(f"... and {len(summary.errors) - _ERRORS} more errors; `--json` lists all", err=True)
    missing = ((f"{m.project}/{m.variant}" if m.variant else m.project, m.reason, m.hint) for m in summary.unavailable)
    print_reasons("not built", missing)
    _print_table(summary)
    # Other skipped checks do not apply to the package.
    skipped = ((b.variant, reason, "") for b in summary.packages if (reason := b.skipped_checks.get("load")))
    print_reasons("not loaded here", skipped)
    binaries = len({built.module for built in summary.packages if any(built.path.glob(f"{built.module}.*so"))})
    click.echo(
        f"{counted(len(summary.packages), 'variant')} from {counted(binaries, 'binary')}; "
        f"{counted(summary.compiles, 'file')} compiled in {summary.cpu_seconds:.1f} s of processor time; "
        f"{summary.seconds:.1f} s in all{f'; in a sandbox ({summary.sandbox})' if summary.sandbox else ''}"
    )


def _print_table(summary: BuildSummary) -> None:
    rows = [("project", "variant", "status", "size", "checks", "binary shared with")]
    for built in summary.packages:
        passed = f"{len(built.passed_checks)} passed{', load skipped' if 'load' in built.skipped_checks else ''}"
        others = built.shares_binary_with
        shares = f"{len(others)} more" if len(others) > 1 else "".join(others)
        rows.append((built.project, built.variant, built.status, f"{built.bytes / 1024:.0f} KiB", passed, shares))
    for failed in summary.failures:
        state = "failed; the package of an earlier build is outdated" if failed.outdated else "failed"
        rows.append((failed.project, failed.variant or "-", state, "", "", ""))
    table(rows if len({row[0] for row in rows[1:]}) > 1 else [row[1:] for row in rows])


@click.command()
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@selection_options
@click.option(
    "--platform",
    "platforms",
    multiple=True,
    type=click.Choice([*PLATFORMS, "all"]),
    help="Build for this platform; may be repeated. [default: this machine's]",
)
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    metavar="NUMBER",
    help="Compile only for this capability, such as 9.0; may be repeated. `upload` refuses such packages.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write packages here instead of DIR/build.")
@owner_option
@toolchain_options
@load_option
@allow_option
@click.option(
    "--keep-generated",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write the C++ projects that the build generates from aot.toml to DIR/NAME.",
)
@click.option(
    "--sandbox",
    type=click.Choice(["auto", "require", "off"]),
    default="auto",
    show_default=True,
    help="Run compilers and load packages without network and without access to other files: where the system "
    "permits it, always (otherwise fail), or never.",
)
@json_option
def build(directories: tuple[Path, ...], platforms: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Build the kernel projects in DIR (default: here).

    Every variant that the Hub asks for on this machine's platform goes to DIR/build/<variant>/. Missing compilers and
    headers are downloaded once and verified; Nix, a GPU and a CUDA installation are not needed. nvcc compiles for CUDA
    13, and clang for CUDA 12. A failure does not stop the other variants: a table at the end lists the packages, and
    the exit status is 0 if all of them were built.

    For another platform, a cross compiler of the system compiles host code (Debian, Ubuntu: apt-get install
    g++-aarch64-linux-gnu). The environment variable CXX names this platform's g++, PIP_INDEX_URL the package index,
    KERNEL_BUILDER_CACHE the cache directory, and KERNEL_BUILDER_SHARED_CACHE a second cache that is only read.

    \b
    kernel-builder build kernels/rmsnorm
    kernel-builder build kernels/rmsnorm --platform all
    kernel-builder build kernels/* --backend cuda --jobs 4
    kernel-builder build . --variant torch214-cxx11-cu130-x86_64-linux
    kernel-builder build . --capability 9.0
    kernel-builder build third-party-kernel --sandbox require
    """
    toolchains = {name: options.pop(name) for name in ("cuda_home", "cuda_compiler", "offline")}
    summary = run(
        BuildRequest(
            directories=directories or (Path(),),
            platforms=PLATFORMS if "all" in platforms else platforms,
            shared_cache=shared_cache(),
            **options,
        ),
        lambda progress: Toolchains(progress=progress, **toolchains),
    )
    click.echo(json.dumps(summary.as_dict(), indent=2)) if as_json else print_summary(summary)
    if summary.error:
        raise SystemExit(summary.error.exit_code)


build_and_copy = click.Command(
    "build-and-copy", params=build.params, callback=build.callback, help="Another name for `build`."
)
