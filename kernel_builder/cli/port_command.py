"""`kernel-builder port`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from kernel_builder.cli.shared_options import json_option
from kernel_builder.port.first_build_toml import Port
from kernel_builder.port.first_build_toml import port as port_setup
from kernel_builder.steps.confinement import SandboxMode

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
    and with neither. Its extensions become tables of build.toml. Arguments without a counterpart are listed with their
    line, and so are the necessary changes in the sources. NAME=VALUE sets a variable for SETUP.PY; its options follow
    `--`. Existing files are kept. docs/port.md has the next steps.

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
