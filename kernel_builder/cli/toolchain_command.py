"""`kernel-builder doctor`, and `toolchain`, which fetches, lists, verifies, removes and pins compilers and headers."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from kernel_builder import scaffold
from kernel_builder.cli.shared_options import json_option
from kernel_builder.config.variant import PLATFORMS, this_platform
from kernel_builder.develop.choice import TORCH_INDEX
from kernel_builder.plural import counted
from kernel_builder.progress import shown
from kernel_builder.toolchain import Toolchains, components
from kernel_builder.toolchain.lock import Tree
from kernel_builder.toolchain.survey import BUILDS, ready, survey
from kernel_builder.upkeep import find
from kernel_format.errors import ToolchainError


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


@click.group()
def toolchain() -> None:
    """Manage the pinned compilers and headers.

    `build` downloads them at first use, and needs no network afterwards. They are stored under $KERNEL_BUILDER_CACHE,
    or else in the user's cache directory.

    \b
    kernel-builder toolchain list
    kernel-builder toolchain fetch cuda-13.0 torch-2.10-stable
    kernel-builder toolchain clean
    """


@toolchain.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--platform",
    "platforms",
    type=click.Choice(PLATFORMS),
    multiple=True,
    help="Fetch for builds for this platform; may be repeated. [default: this machine's]",
)
def fetch(names: tuple[str, ...], platforms: tuple[str, ...]) -> None:
    """Download components into the store: by default all but the complete headers of Torch.

    NAME is a component that `toolchain list` shows: cuda-13.0 is nvcc, cuda-libraries-13.0 has the headers of CUDA's
    libraries, torch-2.10-stable and torch-2.10-full have Torch's headers, cutlass_3_8 is a header library. CUDA 12
    needs clang-22, cuda-12.8 and cuda-libraries-12.8.

    \b
    kernel-builder toolchain fetch
    kernel-builder toolchain fetch cuda-13.0 torch-2.10-stable cutlass_3_8
    kernel-builder toolchain fetch --platform x86_64-linux --platform aarch64-linux
    """
    with shown(sys.stderr) as progress:
        toolchains = Toolchains(progress=progress)
        trees: dict[str, Tree] = {}
        for platform in platforms or (this_platform(),):
            pinned = {tree.kind: tree for tree in toolchains.pinned(platform)}
            for name in names or [
                kind for kind in pinned if not (kind.startswith("torch-") and kind.endswith("-full"))
            ]:
                if name not in pinned:
                    raise ToolchainError(
                        f"is not pinned for {platform}; the lock has {', '.join(pinned)}",
                        where=name,
                        hint="`kernel-builder toolchain list` lists the components of the lock",
                    )
                trees[pinned[name].name] = pinned[name]
        fetched = [(tree, toolchains.store.find(tree.name) is None, toolchains.fetch(tree)) for tree in trees.values()]
    for tree, new, path in fetched:
        click.echo(f"{tree.title}: {_megabytes(tree.download) + ' downloaded' if new else 'already there'}: {path}")


@toolchain.command("list")
def list_toolchains() -> None:
    """List the components that are pinned for this platform and those in the store, with sizes."""
    toolchains = Toolchains()
    stored = toolchains.store.trees()
    pinned = {tree.name: tree for tree in toolchains.pinned()}
    for name in {**pinned, **stored}:
        kind, title = (pinned[name].kind, pinned[name].title) if name in pinned else ("", stored[name].title)
        state = f"in the store, {_megabytes(stored[name].bytes)}" if name in stored else "not in the store"
        origin = f"{_megabytes(pinned[name].download)} to download" if name in pinned else "not in the lock"
        click.echo(f"{kind:<20} {title:<32} {origin:<24} {state}")
    click.echo(f"store: {toolchains.store.root}")


@toolchain.command()
def verify() -> None:
    """Hash every file in the store, and list the files that have changed since they were downloaded."""
    store = Toolchains().store
    trees = store.trees()
    damages = [damage for name in trees for damage in store.damages(name)]
    for path, problem in damages:
        click.echo(f"{path} {problem}")
    click.echo(f"{counted(len(trees), 'toolchain')} checked, {counted(len(damages), 'file')} damaged")
    if damages:
        click.echo("`kernel-builder toolchain clean` removes all toolchains; builds download them again", err=True)
        sys.exit(ToolchainError.exit_code)


@toolchain.command()
def clean() -> None:
    """Remove the toolchains and incomplete downloads; builds download them again."""
    click.echo(f"{_megabytes(Toolchains().store.clear())} freed")


@toolchain.command()
@click.argument("checkout", metavar="[DIR]", default=".", type=click.Path(path_type=Path, file_okay=False))
def update(checkout: Path) -> None:
    """Add the index's new releases to the tables of the builder.

    DIR is a checkout of kernel-builder's repository (default: here). A new Torch release is added to the matrix, with
    its CUDA releases and its C++ standard, and to the table of its exported functions; the lock gets the newest patch
    of every release. Downloads some 0.4 GB. Prints the changes as Markdown, or nothing.

    \b
    kernel-builder toolchain update && git diff --stat
    """
    others = [component for component in components.known().values() if not component.name.startswith("torch-")]
    with shown(sys.stderr) as progress:
        changes, files = find(checkout, others, index_url=None, torch_index=TORCH_INDEX, progress=progress)
    scaffold.write(files, checkout, overwrite=True)
    for line in changes:
        click.echo(f"- {line}")


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check that this machine can build kernels.

    Lists installed and missing requirements for each kind of build, with commands that install them. Also checks a CUDA
    toolkit in $CUDA_HOME. Uses no network. The exit code is 0 if this machine can build both CPU and CUDA kernels, and
    otherwise 1.

    \b
    kernel-builder doctor
    """
    requirements = survey(Toolchains())
    verdict = {build: ready(requirements, build) for build in BUILDS}
    if as_json:
        rows = [{**asdict(row), "ok": row.ok, "hint": None if row.ok else row.hint} for row in requirements]
        click.echo(json.dumps({"ready": verdict, "findings": rows}, indent=2))
    else:
        for requirement in requirements:
            if requirement.ok:
                click.echo(f"{click.style('yes', fg='green')}  {requirement.name:<28} {requirement.value}")
                continue
            needed = [build for build in requirement.needed_for if build in BUILDS]
            mark = click.style("NO ", fg="red") if needed else click.style("no ", fg="yellow")
            purpose = f"needed for {', '.join(requirement.needed_for)}: " if requirement.needed_for else ""
            click.echo(f"{mark}  {requirement.name:<28} {purpose}{requirement.hint}")
        for build, possible in verdict.items():
            click.echo(f"{build} builds: {'ready' if possible else 'not possible yet'}")
    sys.exit(0 if all(verdict.values()) else 1)
