"""`kernel-builder init` and `port`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from kernel_builder import inline_project, scaffold
from kernel_builder.cli.shared_options import json_option
from kernel_builder.config.build_toml import REPO_ID
from kernel_builder.config.project_files import read_project
from kernel_builder.hub.project_sources import published_files
from kernel_builder.port.first_build_toml import Port
from kernel_builder.port.first_build_toml import port as port_setup
from kernel_builder.steps.confinement import SandboxMode
from kernel_format.errors import ConfigError


@click.command()
@click.argument("path", metavar="[PATH|ORG/NAME]", required=False)
@click.option("--name", metavar="ORG/NAME", help="The Hub repository to publish the kernel to.")
@click.option(
    "--op",
    "operators",
    multiple=True,
    metavar="NAME",
    help="The name of the operator: its function, files, tests and layer. With --from FILE, a function in the file "
    "that becomes an operator; may be repeated.",
)
@click.option(
    "--language",
    type=click.Choice(list(scaffold.BACKENDS)),
    help="The language of the device code. [default: cuda]",
)
@click.option(
    "--backends",
    metavar="BACKEND,...",
    help="The backends of the kernel: cpu, cuda; with Triton only cuda.  [default: all of the language]",
)
@click.option(
    "--license", "license_name", default="apache-2.0", show_default=True, help="The SPDX name of the license."
)
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, path_type=Path),
    metavar="DIR|FILE",
    help="Copy the project in DIR to PATH, with the files that its symbolic links point to; or create a project from "
    "the source in FILE, as `kernel_builder.load` takes it.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
def init(
    path: str | None,
    name: str | None,
    operators: tuple[str, ...],
    language: str | None,
    backends: str | None,
    license_name: str,
    source: Path | None,
    overwrite: bool,
) -> None:
    """Create a kernel project that is ready to build.

    The project contains a ReLU operator, with tests and a benchmark, and a copy of the kit, which is the device code
    that kernel-builder's kernels share. --op names the operator in all files. Replace the operator's computation, and
    the text marked `Not written yet`. PATH defaults to a directory with the kernel's name.

    \b
    kernel-builder init org/my-kernel
    kernel-builder init org/activations --op swiglu
    kernel-builder init org/my-kernel --language triton
    kernel-builder init kernels/my-kernel --name org/my-kernel --backends cuda --license mit
    kernel-builder init --from kernels/rmsnorm ../my-rmsnorm
    kernel-builder init org/scale --from scale.cu --op scale
    """
    if source and (backends is not None or language):
        raise ConfigError("the source determines them", where="--backends, --language", hint="leave them out")
    if source and not source.is_file():
        _copy(source, path, name, overwrite=overwrite)
        return
    directory, repo_id = _place(path, name)
    if source:
        _create_from_source(source, operators, directory, repo_id, license_name, overwrite=overwrite)
        return
    if len(operators) > 1:
        raise ConfigError("a new project has one operator", where="--op", hint="use --op once, or --from FILE")
    created = scaffold.create(
        directory,
        repo_id,
        scaffold.BACKENDS[language or "cuda"] if backends is None else [name for name in backends.split(",") if name],
        license_name=license_name,
        language=language or "cuda",
        operator=operators[0] if operators else "relu",
        overwrite=overwrite,
    )
    click.echo(f"Created {created}; its README.md describes the files, the benchmark and the publication. Next:")
    _list_commands(created)
    if missing := [name for name in ("torch", "pytest") if find_spec(name) is None]:
        click.echo(f"Tests and benchmarks need more distributions:\n  pip install {' '.join(missing)}")


def _list_commands(directory: Path) -> None:
    click.echo(f"  kernel-builder build {shlex.quote(str(directory))}")
    if (directory / "tests").is_dir():
        click.echo(f"  pytest {shlex.quote(str(directory / 'tests'))}")
    if (directory / "benchmarks").is_dir():
        click.echo(f"  kernel-builder benchmark {shlex.quote(str(directory))}")


def _copy(source: Path, path: str | None, name: str | None, *, overwrite: bool) -> None:
    if path is None or name is not None:
        raise ConfigError(
            "expected the directory of the copy, and no --name: the copy has the project's name",
            where="init --from",
            hint=f"run `kernel-builder init --from {shlex.quote(str(source))} DIR`; change the name in build.toml",
        )
    project = read_project(source)
    files = {name: (project.root / name).read_bytes() for name in published_files(project.root)}
    scaffold.write(files, Path(path), overwrite=overwrite)
    click.echo(f"Copied {project.name} to {path}. Next:")
    _list_commands(Path(path))


def _create_from_source(
    source: Path, functions: Sequence[str], directory: Path | None, repo_id: str, license_name: str, *, overwrite: bool
) -> None:
    name = scaffold.kernel_name(repo_id)
    text = source.read_text(encoding="utf-8")
    written = inline_project.files(
        repo_id, text, functions, stem=source.stem, license_name=license_name, for_authors=True
    )
    directory = directory or Path(name)
    scaffold.write(written, directory, overwrite=overwrite)
    click.echo(f"Created {directory} from {source}. Next:")
    _list_commands(directory)


def _place(path: str | None, name: str | None) -> tuple[Path | None, str]:
    """Return the directory, or None for the default, and the Hub repository."""
    if name is not None:
        return Path(path) if path is not None else None, name
    if path is None:
        raise ConfigError(
            "the name of the Hub repository is missing", where="init", hint="run `kernel-builder init org/my-kernel`"
        )
    owner, slash, kernel = path.partition("/")
    if not slash or Path(owner).exists() or not re.fullmatch(REPO_ID, path):
        kernel = Path(path).name or "my-kernel"
        hint = f"run `kernel-builder init {shlex.quote(path)} --name org/{kernel}`"
        if not slash:
            hint = f"run `kernel-builder init org/{kernel}`, where org is your organization or user name on the Hub"
        raise ConfigError(
            f"{path!r} is a directory; the name of the Hub repository is missing", where="init", hint=hint
        )
    return None, path


_SHOWN = 12  # lines of a kind


@click.command()
@click.argument("setup", metavar="[SETUP.PY]", default="setup.py", type=click.Path(path_type=Path))
@click.argument("words", metavar="[NAME=VALUE | -- OPTION]...", nargs=-1)
@click.option("--name", metavar="ORG/NAME", help="The Hub repository to publish the kernel to.")
@click.option("--dry-run", is_flag=True, help="Print the build.toml; write nothing.")
@click.option(
    "--sandbox",
    type=click.Choice(["require", "auto", "off"]),
    default="require",
    show_default=True,
    help="Whether SETUP.PY runs without network and without sight of other files.",
)
@json_option
def port(
    setup: Path, words: tuple[str, ...], name: str | None, dry_run: bool, sandbox: SandboxMode, as_json: bool
) -> None:
    """Write a first build.toml for a project of torch.utils.cpp_extension.

    SETUP.PY runs in a sandbox with stubs of setuptools and Torch, as on a machine with CUDA and a GPU, with CUDA alone,
    and with neither. Its extensions become tables of build.toml. The command lists arguments without a counterpart, and
    necessary changes in the sources, with their lines. NAME=VALUE sets a variable for SETUP.PY; its options follow
    `--`. Existing files stay unchanged. docs/port.md describes the next steps.

    \b
    kernel-builder port setup.py --dry-run
    kernel-builder port setup.py --name org/my-kernel
    kernel-builder port setup.py BUILD_CUDA=1 -- --cuda_ext
    """
    path = setup / "setup.py" if setup.is_dir() else setup
    ported = port_setup(path, name, words, sandbox)
    written = [] if dry_run else ported.write()
    if as_json:
        click.echo(json.dumps({"written": written, **ported.as_dict()}))
        return
    if dry_run:
        click.echo(ported.files["build.toml"])
    _print(ported, path.name, written)


def _print(ported: Port, setup: str, written: Sequence[str]) -> None:
    for kernel in ported.kernels:
        click.echo(f"{setup}:{kernel.line}: {kernel.name}, {kernel.backend}, sources: {len(kernel.src)}")
    remarks = {
        "failed": list(ported.failed),
        "left out": list(map(str, ported.left_out)),
        "assumed": list(map(str, ported.assumed)),
        "to change": list(map(str, ported.rewrites)),
        "to do": list(ported.notes),
    }
    for kind, lines in remarks.items():
        shown = lines if kind in ("failed", "left out") else lines[:_SHOWN]
        for line in shown:
            click.echo(f"{kind}: {line}")
        if lines[len(shown) :]:
            click.echo(f"{kind}: and {len(lines) - len(shown)} more; --json has all")
    for name in written:
        click.echo(f"wrote {ported.directory / name}")
