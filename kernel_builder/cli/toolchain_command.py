"""`kernel-builder toolchain`: fetch, list, verify and remove pinned compilers and headers, and pin new ones."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernel_builder.cli.shared_options import ReleaseType, index_url_option, json_option
from kernel_builder.config.variant import PLATFORMS, Release, this_platform
from kernel_builder.plural import counted
from kernel_format.errors import ToolchainError

if TYPE_CHECKING:
    from kernel_builder.toolchain.toolchains import Toolchains
    from kernel_builder.toolchain.trees import Tree


lock_option = click.option(
    "--lock",
    "lock_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A toolchain lock. [default: the one that comes with the builder]",
)


def _toolchains(lock_file: Path | None, **settings: Any) -> Toolchains:
    from kernel_builder.toolchain import Toolchains, lock

    return Toolchains(pinned=lock.read(lock_file) if lock_file else None, **settings)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


@click.group()
def toolchain() -> None:
    """Manage the pinned compilers and headers.

    `build` downloads them when it first needs them, and needs no network afterwards. They are stored under
    $KERNEL_BUILDER_CACHE, or else in the user's cache directory.

    \b
    kernel-builder toolchain list
    kernel-builder toolchain fetch --cuda 13.0 --torch 2.10
    kernel-builder toolchain clean --older-than 90
    """


@toolchain.command()
@click.option("--cuda", type=ReleaseType(), multiple=True, help="A CUDA release such as 13.0; may be repeated.")
@click.option("--torch", type=ReleaseType(), multiple=True, help="A Torch release such as 2.10; may be repeated.")
@click.option(
    "--dependency",
    "dependencies",
    multiple=True,
    metavar="NAME",
    help="A header library such as cutlass_3_8; may be repeated.",
)
@click.option(
    "--headers",
    type=click.Choice(["stable", "full"]),
    default="stable",
    show_default=True,
    help="Fetch Torch's headers of the stable ABI, or all of them.",
)
@click.option(
    "--platform",
    "platforms",
    type=click.Choice(PLATFORMS),
    multiple=True,
    help="Fetch what builds for this platform need; may be repeated. [default: this machine's]",
)
@index_url_option
@lock_option
@json_option
def fetch(
    cuda: tuple[Release, ...],
    torch: tuple[Release, ...],
    dependencies: tuple[str, ...],
    headers: str,
    platforms: tuple[str, ...],
    index_url: str | None,
    lock_file: Path | None,
    as_json: bool,
) -> None:
    """Download what the options name into the store; without --cuda, --torch and --dependency, everything.

    --cuda fetches a compiler and the headers of CUDA's libraries, such as cuBLAS. That of CUDA 12 is clang.

    \b
    kernel-builder toolchain fetch
    kernel-builder toolchain fetch --cuda 13.0 --torch 2.10 --dependency cutlass_3_8
    kernel-builder toolchain fetch --torch 2.14 --headers full
    kernel-builder toolchain fetch --platform x86_64-linux --platform aarch64-linux
    """
    from kernel_builder.progress import shown

    with shown(sys.stderr) as progress:
        toolchains = _toolchains(lock_file, index_url=index_url, progress=progress)
        trees: dict[str, Tree] = {}
        for platform in platforms or (this_platform(),):
            pinned = toolchains.pinned(platform)
            chosen = _select(pinned, toolchains.cuda_kinds, cuda, torch, dependencies, headers)
            trees.update((tree.name, tree) for tree in chosen)
        fetched = [(tree, toolchains.store.find(tree.name) is None, toolchains.fetch(tree)) for tree in trees.values()]
    if as_json:
        report = [
            {"name": tree.name, "title": tree.title, "downloaded": tree.download if new else 0, "path": str(path)}
            for tree, new, path in fetched
        ]
        click.echo(json.dumps(report, indent=2))
        return
    for tree, new, path in fetched:
        click.echo(f"{tree.title}: {_megabytes(tree.download) + ' downloaded' if new else 'already there'}: {path}")


def _select(
    offered: Sequence[Tree],
    cuda_kinds: Callable[[Release], list[str]],
    cuda: tuple[Release, ...],
    torch: tuple[Release, ...],
    dependencies: tuple[str, ...],
    headers: str,
) -> list[Tree]:
    pinned = {tree.kind: tree for tree in offered}
    if not cuda and not torch and not dependencies:
        return [tree for kind, tree in pinned.items() if tree.role != "torch" or kind.endswith(f"-{headers}")]
    wanted = [kind for release in cuda for kind in cuda_kinds(release)]
    wanted += [f"torch-{release}-{headers}" for release in torch]
    wanted += dependencies
    for kind in wanted:
        if kind not in pinned:
            raise ToolchainError(
                f"is not pinned for the platform; the lock has {', '.join(pinned)}",
                where=kind,
                hint="`kernel-builder toolchain list` lists what is pinned",
            )
    return [pinned[kind] for kind in dict.fromkeys(wanted)]


@toolchain.command("list")
@lock_option
@json_option
def list_toolchains(lock_file: Path | None, as_json: bool) -> None:
    """List what is pinned for this platform and what is in the store, with sizes."""
    toolchains = _toolchains(lock_file)
    stored = {tree.name: tree for tree in toolchains.store.trees()}
    rows: list[dict[str, Any]] = [
        {
            "name": tree.name,
            "title": tree.title,
            "pinned": True,
            "download": tree.download,
            "stored": stored.pop(tree.name).bytes if tree.name in stored else None,
        }
        for tree in toolchains.pinned()
    ]
    rows += [
        {"name": tree.name, "title": tree.title, "pinned": False, "download": None, "stored": tree.bytes}
        for tree in stored.values()
    ]
    if as_json:
        click.echo(json.dumps({"store": str(toolchains.store.root), "toolchains": rows}, indent=2))
        return
    for row in rows:
        state = f"in the store, {_megabytes(row['stored'])}" if row["stored"] is not None else "not in the store"
        origin = f"{_megabytes(row['download'])} to download" if row["pinned"] else "not in the lock"
        click.echo(f"{row['title']:<32} {origin:<24} {state}")
    click.echo(f"store: {toolchains.store.root}")


@toolchain.command()
@click.option("--remove", is_flag=True, help="Remove damaged toolchains; the next use downloads them again.")
@json_option
def verify(remove: bool, as_json: bool) -> None:
    """Hash every file in the store, and list the files that have changed since they were downloaded."""
    toolchains = _toolchains(None)
    store = toolchains.store
    names = store.names()
    damages = [damage for name in names for damage in store.verify(name)]
    if remove:
        for name in {damage.tree for damage in damages}:
            store.remove(name)
    if as_json:
        rows = [{"tree": damage.tree, "path": str(damage.path), "problem": damage.problem} for damage in damages]
        click.echo(json.dumps({"checked": names, "damages": rows}, indent=2))
    else:
        for damage in damages:
            click.echo(f"{damage.path} {damage.problem}")
        click.echo(f"{counted(len(names), 'toolchain')} checked, {counted(len(damages), 'file')} damaged")
        if damages and not remove:
            click.echo("`kernel-builder toolchain verify --remove` removes the damaged ones", err=True)
    if damages and not remove:
        sys.exit(ToolchainError.exit_code)


@toolchain.command()
@click.option("--all", "everything", is_flag=True, help="Remove every toolchain.")
@click.option("--older-than", type=click.IntRange(min=0), metavar="DAYS", help="Remove toolchains not used for DAYS.")
@json_option
def clean(everything: bool, older_than: int | None, as_json: bool) -> None:
    """Remove the rests of interrupted downloads, and the toolchains that the options name.

    \b
    kernel-builder toolchain clean --older-than 90
    kernel-builder toolchain clean --all
    """
    store = _toolchains(None).store
    limit = time.time() - older_than * 86400 if older_than is not None else None
    doomed = [tree for tree in store.trees() if everything or (limit is not None and tree.used <= limit)]
    removed = [tree for tree in doomed if store.remove(tree.name)]
    freed = store.remove_leftovers() + sum(tree.bytes for tree in removed)
    if as_json:
        click.echo(json.dumps({"removed": [tree.name for tree in removed], "freed": freed}, indent=2))
        return
    for tree in removed:
        click.echo(f"removed {tree.title}")
    click.echo(f"{_megabytes(freed)} freed")


@toolchain.command()
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to write. [default: stdout]",
)
@click.option(
    "--torch",
    type=ReleaseType(),
    multiple=True,
    help="A Torch release to pin; may be repeated. [default: those of the matrix]",
)
@click.option(
    "--cuda",
    type=ReleaseType(),
    multiple=True,
    help="A CUDA release to pin; may be repeated. [default: those of the matrix]",
)
@click.option("--platform", "platforms", type=click.Choice(PLATFORMS), multiple=True, help="[default: all]")
@index_url_option
def lock(
    output: Path | None,
    torch: tuple[Release, ...],
    cuda: tuple[Release, ...],
    platforms: tuple[str, ...],
    index_url: str | None,
) -> None:
    """Write a new lock from the index, with the newest patch of every release in the matrix.

    \b
    kernel-builder toolchain lock --output kernel_builder/toolchain/lock.json
    """
    from kernel_builder.backends import cuda as cuda_backend
    from kernel_builder.config import matrix
    from kernel_builder.progress import shown
    from kernel_builder.toolchain import components
    from kernel_builder.toolchain import lock as locks
    from kernel_builder.toolchain.dependencies import known
    from kernel_builder.toolchain.index import Index
    from kernel_builder.toolchain.resolve import ToPin, resolve

    with shown(sys.stderr) as progress:
        pinned = resolve(
            Index(index_url),
            ToPin(
                torch=torch or matrix.torch_releases(),
                cuda=cuda or cuda_backend.releases(),
                platforms=platforms or PLATFORMS,
                libraries=known().values(),
                clang=cuda_backend.clang_releases(),
                components=components.known().values(),
            ),
            progress,
        )
    text = locks.dumps(pinned)
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")


@toolchain.command()
@click.argument("checkout", metavar="[DIR]", default=".", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--torch-index",
    metavar="URL",
    help="The index with Torch's builds for every CUDA release. [default: download.pytorch.org/whl]",
)
@index_url_option
def update(checkout: Path, torch_index: str | None, index_url: str | None) -> None:
    """Add what the index has newer to the tables of the builder.

    DIR is a checkout of kernel-builder's repository (default: here). A new Torch release is added to the matrix, with
    its CUDA releases and its C++ standard, and to the tables of what it exports and loads; the lock gets the newest
    patch of every release. Downloads some 0.4 GB, and 1 GB more for a new Torch release. Prints what has changed as
    Markdown, or nothing.

    \b
    kernel-builder toolchain update && git diff --stat
    """
    from kernel_builder.develop.interpreter import TORCH_INDEX
    from kernel_builder.progress import shown
    from kernel_builder.toolchain import components
    from kernel_builder.toolchain.dependencies import known
    from kernel_builder.upkeep.update import find

    with shown(sys.stderr) as progress:
        newer = find(
            checkout,
            known().values(),
            components.known().values(),
            index_url=index_url,
            torch_index=torch_index or TORCH_INDEX,
            progress=progress,
        )
    newer.write(checkout)
    for line in newer.changes:
        click.echo(f"- {line}")
