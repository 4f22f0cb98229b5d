"""`kernel-builder check-builds`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from kernel_builder import checks
from kernel_builder.checks.findings import CheckReport
from kernel_builder.cli.shared_options import allow_option, json_option
from kernel_builder.config.project_files import own_directory, read_project
from kernel_builder.progress import Lines
from kernel_format.errors import CheckError


@click.command()
@click.argument(
    "directory", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".", metavar="[DIR]"
)
@allow_option
@json_option
def check_builds(directory: Path, allow: tuple[str, ...], as_json: bool) -> None:
    """Run all checks on every package under DIR/build.

    `build` and `upload` run the same checks.

    \b
    kernel-builder check-builds kernels/rmsnorm
    """
    checks.require_allowable(allow)
    packages = packages_of(directory)
    project = read_project(directory) if (directory / "build.toml").is_file() else None
    _print_reports(checks.run_all(packages, allow=allow, project=project, progress=Lines(sys.stderr)), as_json)


def packages_of(directory: Path) -> list[Path]:
    """Return the packages of the project in `directory`, sorted by name."""
    build = own_directory(directory, "build")
    names = sorted(path.name for path in build.glob("[!.]*") if path.is_dir())
    packages = [own_directory(build, name) for name in names]
    if not packages:
        raise CheckError(
            "there is no package to check", where=str(build), hint=f"build it: kernel-builder build {directory}"
        )
    return packages


def _print_reports(reports: Iterable[CheckReport], as_json: bool) -> None:
    """Print reports as they come; exit with the status of a `CheckError` if one of them has errors."""
    seen = []
    for report in reports:
        seen.append(report)
        if not as_json:
            _print_report(report)
    ok = all(report.ok for report in seen)
    if as_json:
        click.echo(json.dumps({"ok": ok, "packages": [report.as_dict() for report in seen]}))
    if not ok:
        raise SystemExit(CheckError.exit_code)


def _print_report(report: CheckReport) -> None:
    click.secho(report.package.directory.name, bold=True)
    if report.passed:
        click.echo(f"  passed   {', '.join(report.passed)}")
    for check, reason in report.skipped.items():
        click.echo(f"  skipped  {check}: {reason}")
    for finding in report.findings:
        click.secho(f"  {finding.severity:<9}", fg="red" if finding.severity == "error" else "yellow", nl=False)
        click.echo(f"{finding.check}: {finding.path}: {finding.message}")
        click.secho("           hint: ", fg="cyan", nl=False)
        click.echo(finding.hint)
