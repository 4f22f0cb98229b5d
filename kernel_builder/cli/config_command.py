"""`kernel-builder check-config` and `update-build`."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from kernel_builder import toml_file
from kernel_builder.cli import of_each, print_notices, report_error
from kernel_builder.cli.shared_options import json_option, table
from kernel_builder.config import build_toml, editions
from kernel_builder.config.build_toml import FILE
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.json_value import json_value
from kernel_builder.plural import counted
from kernel_builder.steps import compile_steps
from kernel_format.errors import ConfigError
from kernel_format.files import write_atomically

_DIRECTORIES = click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))


@click.command()
@_DIRECTORIES
@json_option
def check_config(directories: tuple[Path, ...], as_json: bool) -> None:
    """Validate the build.toml of every DIR (default: here), and list the projects in a table.

    The files that it names must exist, and `build` must accept its flags and sources. Nothing has to be buildable here.
    --json prints every value, with defaults filled in. Of several DIR, those without a build.toml are left out; a
    mistake in one does not stop the others.

    \b
    kernel-builder check-config kernels/rmsnorm
    kernel-builder check-config kernels/*
    """
    results = of_each(directories, _read)
    projects = [project for project in results.values() if isinstance(project, Project)]
    ok = len(projects) == len(results)
    if as_json:
        listed = [
            {"directory": str(path), "ok": True, "project": json_value(result, "_")}
            if isinstance(result, Project)
            else {"directory": str(path), "ok": False, "error": result.as_dict()}
            for path, result in results.items()
        ]
        click.echo(json.dumps({"ok": ok, "projects": listed}))
    else:
        print_notices(projects)
        _print_table(results)
    if not ok:
        raise SystemExit(ConfigError.exit_code)


def _read(path: Path) -> Project:
    project = read_project(path)
    compile_steps.check(project)
    return project


def _print_table(results: Mapping[Path, Project | ConfigError]) -> None:
    """Print one row for each project, after the errors."""
    rows = [("project", "version", "framework", "backends")]
    for path, result in results.items():
        if isinstance(result, Project):
            rows.append(
                (result.name, str(result.version), result.framework.table, ", ".join(map(str, result.backends)))
            )
        else:
            report_error(result, as_json=False)
            rows.append((path.name, "error", "", ""))
    table(rows)
    accepted = sum(isinstance(result, Project) for result in results.values())
    click.echo(f"{accepted} of {counted(len(results), 'project')} accepted")


@click.command()
@_DIRECTORIES
@click.option("--check", "--dry-run", "check", is_flag=True, help="Change nothing; exit with 1 if a file would change.")
@click.option("--license", metavar="NAME", help="The SPDX license name for files without `license`.")
def update_build(directories: tuple[Path, ...], check: bool, license: str | None) -> None:
    """Convert the build.toml of every DIR (default: here) to edition 6, and show the difference.

    Comments and the order of keys are kept. A file of edition 6 is unchanged, and so is a file that would not be valid
    in edition 6, which does not stop the others.

    \b
    kernel-builder update-build kernels/rmsnorm
    kernel-builder update-build kernels/* --check
    kernel-builder update-build old-kernel --license apache-2.0
    """
    results = of_each(directories, lambda directory: _update(directory / FILE, license, write=not check))
    failed = [error for error in results.values() if isinstance(error, ConfigError)]
    for error in failed:
        report_error(error, as_json=False)
    changed = [path for path, result in results.items() if result is True]
    done = "would be converted" if check else "converted"
    click.echo(
        f"{len(changed)} of {counted(len(results), 'file')} {done}" + (f", {len(failed)} failed" if failed else "")
    )
    if failed:
        raise SystemExit(ConfigError.exit_code)
    if check and changed:
        raise SystemExit(1)


def _update(path: Path, license: str | None, *, write: bool) -> bool:
    """Show the changes of a file, and write it. Return whether it changes."""
    old = build_toml.read_text(path)
    new = editions.converted(old, path, license)
    build_toml.from_document(toml_file.parse(new, str(path)), str(path), path.parent)
    if old == new:
        return False
    _show_difference(old.splitlines(), new.splitlines(), str(path))
    if write:
        real = Path(os.path.realpath(path))
        mark = "\ufeff" if real.read_bytes().startswith(b"\xef\xbb\xbf") else ""
        write_atomically(real, mark + new, mode=real.stat().st_mode & 0o777)
    return True


def _show_difference(old: Sequence[str], new: Sequence[str], name: str) -> None:
    colours = {"+": "green", "-": "red"}
    for line in difflib.unified_diff(old, new, name, name, lineterm=""):
        click.secho(line, fg=colours.get(line[0]))
