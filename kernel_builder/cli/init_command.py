"""`kernel-builder init`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from kernel_builder.config.build_toml import REPO_ID
from kernel_builder.config.project_files import read_project
from kernel_format.errors import ConfigError

_BACKENDS = "--backends"
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"


class _Init(click.Command):
    """Allows `--backends cpu cuda`; click's options take a fixed number of values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        inside = False
        for arg in args:
            if arg.startswith("-"):
                inside = arg.partition("=")[0] == _BACKENDS
            elif inside and spread[-1] != _BACKENDS:
                spread.append(_BACKENDS)
            spread.append(arg)
        return super().parse_args(ctx, spread)


@click.command(cls=_Init)
@click.argument("path", metavar="[PATH|ORG/NAME]", required=False)
@click.option("--name", metavar="ORG/NAME", help="The Hub repository to publish the kernel to.")
@click.option(
    "--op", "operator", metavar="NAME", help="The name of the operator: its function, files, tests and layer."
)
@click.option(
    _BACKENDS,
    multiple=True,
    default=("cpu", "cuda"),
    show_default=True,
    metavar="BACKEND...",
    help="The backends of the kernel: cpu, cuda.",
)
@click.option("--license", "licence", default="apache-2.0", show_default=True, help="The SPDX name of the licence.")
@click.option(
    "--kit",
    "on_kit",
    is_flag=True,
    help="Start from an operator on the kit, device code for several kernels; its files are copied into the project, "
    "or linked if ../kit in the same git repository has them. It needs both back ends, CPU and CUDA.",
)
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="DIR|FILE",
    help="Copy the project in DIR to PATH instead, with the files that its symbolic links lead to; or make a project "
    "of the source in FILE, as `kernel_builder.load` takes it.",
)
@click.option(
    "--function", "functions", multiple=True, metavar="NAME", help="A function in --from FILE that becomes an operator."
)
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
def init(
    path: str | None,
    name: str | None,
    operator: str | None,
    backends: tuple[str, ...],
    licence: str,
    on_kit: bool,
    source: Path | None,
    functions: tuple[str, ...],
    overwrite: bool,
) -> None:
    """Create a kernel project that is ready to build.

    The project has a ReLU operator to start from, with tests and a benchmark; with --kit it is a SiLU operator with
    vectorized loads, PDL and a launch table. --op names the operator everywhere at once; what it computes is then yours
    to replace, and `Not written yet` marks the words about it. PATH defaults to a directory of the kernel's name.

    \b
    kernel-builder init org/my-kernel
    kernel-builder init org/activations --op swiglu
    kernel-builder init kernels/my-kernel --name org/my-kernel --backends cuda --license mit
    kernel-builder init kernels/my-kernel --name org/my-kernel --kit
    kernel-builder init --from kernels/rmsnorm ../my-rmsnorm
    kernel-builder init org/scale --from scale.cu --function scale
    """
    from kernel_builder.scaffold import create

    if source and not source.is_file():
        _copy(source, path, name, overwrite=overwrite)
        return
    directory, repo_id = _place(path, name)
    if source:
        _of_source(source, functions, directory, repo_id, licence, overwrite=overwrite)
        return
    words = [word for value in backends for word in value.replace(",", " ").split()]
    created = create(directory, repo_id, words, licence=licence, operator=operator, on_kit=on_kit, overwrite=overwrite)
    shown = shlex.quote(str(created))
    click.echo(f"Created {created}; its README.md says what is where, how to benchmark and how to publish. Next:")
    click.echo(f"  kernel-builder build {shown}")
    click.echo(f"  pytest {shlex.quote(str(created / 'tests'))}")
    _print_missing()


def _print_missing() -> None:
    """Say what the tests and the benchmark of a project need and this environment lacks."""
    missing = [name for name in ("torch", "pytest") if find_spec(name) is None]
    if missing:
        click.echo(f"Tests and benchmarks need what is not installed here:\n  pip install {' '.join(missing)}")
    if "torch" in missing:
        click.echo(f"Without a GPU add {CPU_INDEX}, whose Torch has no CUDA and is smaller.")


def _copy(source: Path, path: str | None, name: str | None, *, overwrite: bool) -> None:
    from kernel_builder.hub.project_sources import published_files
    from kernel_builder.scaffold import copy

    if path is None or name is not None:
        raise ConfigError(
            "expected the directory of the copy, and no other name: the project keeps its own",
            where="init --from",
            hint=f"write `kernel-builder init --from {shlex.quote(str(source))} DIR`; rename it in build.toml",
        )
    project = read_project(source)
    files = {name: (project.root / name).read_bytes() for name in published_files(project.root)}
    copy(files, Path(path), overwrite=overwrite)
    click.echo(f"Copied {project.name} to {path}. Next:\n  kernel-builder build {shlex.quote(path)}")


def _of_source(
    source: Path, functions: Sequence[str], directory: Path | None, repo_id: str, licence: str, *, overwrite: bool
) -> None:
    from kernel_builder import inline_project
    from kernel_builder.scaffold import copy, kernel_name

    name = kernel_name(repo_id)
    written = inline_project.files(repo_id, source.read_text(encoding="utf-8"), functions, licence=licence)
    directory = directory or Path(name)
    copy({path: text.encode() for path, text in written.items()}, directory, overwrite=overwrite)
    click.echo(f"Created {directory} from {source}. Next:\n  kernel-builder build {shlex.quote(str(directory))}")


def _place(path: str | None, name: str | None) -> tuple[Path | None, str]:
    """Return the directory, or None for the default, and the Hub repository."""
    if name is not None:
        return Path(path) if path is not None else None, name
    if path is None:
        raise ConfigError(
            "expected the Hub repository of the kernel", where="init", hint="write `kernel-builder init org/my-kernel`"
        )
    owner, slash, kernel = path.partition("/")
    if not slash or Path(owner).exists() or not re.fullmatch(REPO_ID, path):
        kernel = Path(path).name or "my-kernel"
        hint = f"write `kernel-builder init {shlex.quote(path)} --name org/{kernel}`"
        if not slash:
            hint = f"write `kernel-builder init org/{kernel}`, with your organisation or user name on the Hub for org"
        raise ConfigError(
            f"{path!r} says where to create the project, and not to which Hub repository it belongs",
            where="init",
            hint=hint,
        )
    return None, path
