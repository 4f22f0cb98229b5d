"""`kernel-builder check-config` and `update-build`."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path

import click

from kernel_builder import toml_file
from kernel_builder.cli import of_each, print_notices, report_error
from kernel_builder.cli.shared_options import json_option, table
from kernel_builder.config import build_toml, editions
from kernel_builder.config.build_toml import FILE
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import check_link, read_project
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

    Checks that the named files exist, and that `build` accepts the flags and sources. This machine need not be able to
    build the projects. --json prints every value, including defaults. With several DIR, those without a build.toml are
    skipped, and an error in one does not stop the others.

    \b
    kernel-builder check-config kernels/*
    """
    projects, errors = of_each(directories, _read)
    if as_json:
        answers = {path: {"ok": True, "project": json_value(project, "_")} for path, project in projects.items()}
        answers |= {path: {"ok": False, "error": error.as_dict()} for path, error in errors.items()}
        listed = [{"directory": str(path), **answers[path]} for path in sorted(answers)]
        click.echo(json.dumps({"ok": not errors, "projects": listed}))
    else:
        print_notices(list(projects.values()))
        rows = [("project", "version", "framework", "backends")]
        for project in projects.values():
            backends = ", ".join(map(str, project.backends))
            rows.append((project.name, str(project.version), project.framework.table, backends))
        for path, error in errors.items():
            report_error(error, as_json=False)
            rows.append((path.name, "error", "", ""))
        table(rows)
        click.echo(f"{len(projects)} of {counted(len(rows) - 1, 'project')} accepted")
    if errors:
        raise SystemExit(ConfigError.exit_code)


def _read(path: Path) -> Project:
    project = read_project(path)
    compile_steps.check(project)
    return project


@click.command()
@_DIRECTORIES
@click.option("--check", "--dry-run", "check", is_flag=True, help="Change nothing; exit with 1 if a file would change.")
@click.option("--license", metavar="NAME", help="The SPDX license name for files without `license`.")
def update_build(directories: tuple[Path, ...], check: bool, license: str | None) -> None:
    """Convert the build.toml of every DIR (default: here) to edition 6, and show the difference.

    Keeps comments and the order of keys. A file of edition 6 stays unchanged. So does a file that would be invalid in
    edition 6, which does not stop the others.

    \b
    kernel-builder update-build kernels/* --check
    kernel-builder update-build old-kernel --license apache-2.0
    """
    updated, failed = of_each(directories, lambda directory: _update(directory / FILE, license, write=not check))
    for error in failed.values():
        report_error(error, as_json=False)
    changed = sum(updated.values())
    done = "would be converted" if check else "converted"
    files = counted(len(updated) + len(failed), "file")
    click.echo(f"{changed} of {files} {done}" + (f", {len(failed)} failed" if failed else ""))
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
    colours = {"+": "green", "-": "red"}
    for line in difflib.unified_diff(old.splitlines(), new.splitlines(), str(path), str(path), lineterm=""):
        click.secho(line, fg=colours.get(line[0]))
    if write:
        check_link(Path(os.path.realpath(path.parent)), path, FILE, str(path))
        real = Path(os.path.realpath(path))
        mark = "\ufeff" if real.read_bytes().startswith(b"\xef\xbb\xbf") else ""
        write_atomically(real, mark + new, mode=real.stat().st_mode & 0o777)
    return True
