"""`kernel-builder upload`, `build-and-upload`, `fill-card` and `wheel`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import click
from huggingface_hub.utils import disable_progress_bars

from kernel_builder import pipeline
from kernel_builder.cli import print_notices
from kernel_builder.cli.build_command import print_summary, run
from kernel_builder.cli.shared_options import (
    allow_option,
    directory_argument,
    json_option,
    load_option,
    owner_option,
    selection_options,
    together,
)
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import this_platform
from kernel_builder.hub import card
from kernel_builder.hub.package_api import Api
from kernel_builder.hub.packages import HubPackage
from kernel_builder.hub.publication import API_CHANGE, LARGE_FILE, UNTESTED, BranchResult, Published, PublishRequest
from kernel_builder.hub.publish import publish
from kernel_builder.plural import counted
from kernel_builder.progress import Lines, Progress
from kernel_builder.toolchain import Toolchains
from kernel_builder.wheel import write_wheels
from kernel_format.files import write_atomically

_LISTED = 100

_publish_options = together(
    directory_argument,
    click.option(
        "--repo-id", metavar="ORG/NAME", help="The repository. [default: [general.hub] repo-id of build.toml]"
    ),
    owner_option,
    click.option("--branch", metavar="NAME", help="The branch for the builds. [default: v<version>]"),
    click.option("--private", is_flag=True, help="Make a new repository private."),
    click.option("--create-pr", is_flag=True, help="Open pull requests instead of committing."),
    click.option("--prune", is_flag=True, help="Delete the variants on the branch that are not in DIR/build."),
    click.option("--card-note", metavar="TEXT", help="A sentence for the card, such as how the packages were tested."),
    click.option("--dry-run", is_flag=True, help="Check and compare, print the changes, and write nothing."),
    load_option,
    click.option(
        "--allow",
        multiple=True,
        metavar="CHECK",
        help=f"Report the errors of this check as warnings; may be repeated. `{UNTESTED}` permits packages that have "
        f"not run on their hardware (ROCm), `{API_CHANGE}` permits an API that breaks callers of this version, and "
        f"`{LARGE_FILE}` permits sources above 10 MiB.",
    ),
    json_option,
    # Options of the public tool, accepted for scripts.
    click.option("--repo-type", type=click.Choice(["kernel"]), hidden=True, expose_value=False),
    click.option("--quiet", "-q", is_flag=True, hidden=True),
    click.option(
        "--output-json", is_flag=False, flag_value="", type=click.Path(path_type=Path, dir_okay=False), hidden=True
    ),
)


@click.command()
@_publish_options
@click.option("--build", is_flag=True, help="Rebuild the packages in DIR/build first, if their sources have changed.")
def upload(directory: Path, build: bool, quiet: bool, as_json: bool, output_json: Path | None, **options: Any) -> None:
    """Publish the packages of a project to a Hub.

    DIR is the project (default: here). All checks run first. The packages become one commit on the branch of their
    version; the sources and the card become one commit on main. Variants on the branch that are not in DIR/build stay.
    The command sends only files that the Hub does not have, so repeating it completes an interrupted upload.

    Packages must be built from the sources beside them. All packages of a version must have the same API.

    The Hub is $HF_ENDPOINT, or else huggingface.co. The token is $HF_TOKEN, or else the token of `hf auth login`.

    \b
    kernel-builder upload kernels/rmsnorm --dry-run
    kernel-builder upload kernels/rmsnorm
    HF_ENDPOINT=http://127.0.0.1:8080 kernel-builder upload kernels/rmsnorm --owner me
    """
    variants = None
    if build:
        built = (path.parent.name for path in sorted(directory.glob("build/[!.]*/metadata.json")))
        variants = [name for name in built if not name.endswith("-linux") or name.endswith(this_platform())]
    if not quiet:
        print_notices([read_project(directory)])
    to_build = {"variants": tuple(variants)} if variants is not None else None
    _upload(PublishRequest(directory, **options), to_build, quiet=quiet, as_json=as_json, output_json=output_json)


@click.command()
@_publish_options
@selection_options
def build_and_upload(quiet: bool, as_json: bool, output_json: Path | None, **options: Any) -> None:
    """Run `build`, then `upload`.

    DIR is the project (default: here). Other packages in DIR/build, such as the variants of another machine, are
    published too.

    \b
    kernel-builder build-and-upload kernels/rmsnorm --backend cuda
    """
    to_build = {name: options.pop(name) for name in ("variants", "backends", "whole", "jobs")}
    _upload(PublishRequest(**options), to_build, quiet=quiet, as_json=as_json, output_json=output_json)


@click.command()
@directory_argument
@click.argument("output", metavar="[FILE]", default="-", type=click.File("w", encoding="utf-8"))
def fill_card(directory: Path, output: TextIO) -> None:
    """Print the card that `upload` would publish, or write it to FILE.

    DIR is the project (default: here). The card is CARD.md, followed by the API and the variants of the packages in
    DIR/build. The packages are read, not loaded.

    \b
    kernel-builder fill-card kernels/rmsnorm
    """
    project = read_project(directory)
    packages = {path.parent.name: HubPackage(path.parent) for path in project.root.glob("build/[!.]*/metadata.json")}
    api = packages[min(packages)].api if packages else Api({}, {})
    output.write(card.render(project, project.hub_repo_id or f"org/{project.name}", packages, api))


def _upload(
    request: PublishRequest, to_build: Mapping[str, Any] | None, *, quiet: bool, as_json: bool, output_json: Path | None
) -> None:
    """Build the selected variants of the project, if any, and publish it; exit if one of them fails."""
    as_json = as_json or output_json == Path()
    silent = quiet or as_json
    if to_build is not None:
        wanted = pipeline.BuildRequest(
            directories=(request.directory,),
            owner=request.owner,
            load=request.load,
            allow=request.allowed_checks,
            **to_build,
        )
        summary = run(wanted, lambda progress: Toolchains(progress=progress))
        if not silent:
            print_summary(summary)
        if summary.error:
            raise summary.error if silent else SystemExit(summary.error.exit_code)
    if silent:
        disable_progress_bars()
    published = publish(request, Progress() if quiet else Lines(sys.stderr))
    if output_json and output_json != Path():
        write_atomically(output_json, json.dumps(published.as_public_summary(), indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(published.as_dict(), indent=2))
    elif not quiet:
        _print(published)


def _print(published: Published) -> None:
    for names, action in (
        (published.variants, "would be published" if published.dry_run else "published"),
        (published.kept, "kept"),
        (published.removed, "removed"),
    ):
        for name in names:
            dirty = "  (sources or builder had uncommitted changes)" if name in published.dirty else ""
            click.echo(f"{action:<10} {name}{dirty}")
    for name, reason in sorted(published.left_out.items()):
        click.secho(f"not published: {name}: {reason}; `--allow {UNTESTED}` publishes it", fg="yellow")
    for reason in dict.fromkeys(published.not_loaded.values()):
        skipped = ", ".join(name for name, why in published.not_loaded.items() if why == reason)
        click.secho(f"not loaded here: {skipped}: {reason}", fg="yellow")
    if published.without_commit:
        click.secho(
            f"warning: no commit has the sources of {', '.join(published.without_commit)}, so users cannot verify "
            "them; commit the sources, build and upload again",
            fg="yellow",
        )
    for line in published.api_changes:
        click.secho(f"API: {line}", fg="yellow")
    for result in (published.builds, published.main):
        if result:
            click.echo(_described(result, published.dry_run))
            listed = [name for name in result.sent if not name.startswith("build/")]
            click.echo("".join(f"  {name}\n" for name in listed[:_LISTED]), nl=False)
            if listed[_LISTED:]:
                click.echo(f"  ... and {len(listed) - _LISTED} more; --json has all")
    if published.note:
        click.echo(published.note)
    click.echo(published.url)


def _described(result: BranchResult, dry_run: bool) -> str:
    if not result.sent and not result.removed:
        return f"{result.branch}: nothing to do, {counted(result.unchanged, 'file')} up to date"
    line = (
        f"{result.branch}: {counted(len(result.sent), 'file')} {'to send' if dry_run else 'sent'} "
        f"({result.bytes / 2**20:.1f} MiB), {result.unchanged} unchanged, {len(result.removed)} removed"
    )
    return f"{line}\n  {result.pull_request or result.url}" if result.url else line


@click.command()
@directory_argument
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Write wheels here. [default: DIR/dist]")
@click.option("--name", metavar="NAME", help="The name in the package index. [default: the name in build.toml]")
@click.option(
    "--depends",
    multiple=True,
    metavar="NAME=INDEX_NAME",
    help="The package index's name of the kernel NAME in kernel-depends; may be repeated. [default: NAME]",
)
@click.option(
    "--version", metavar="N.M", help="The version in the package index; N is the version of build.toml. [default: N.0]"
)
@owner_option
@load_option
@allow_option
@json_option
def wheel(directory: Path, as_json: bool, **options: Any) -> None:
    """Write wheels of a project, for pip and uv.

    DIR is the project (default: here). A wheel has all packages of DIR/build for one platform, and selects one at
    import by the rule of get_kernel. It needs Torch, but not the Hub's client. `wheel` runs the checks of `upload`
    first. Equal packages give equal bytes.

    A package index accepts each version once: pass a new --version for each release. One process can use both
    `import my_kernel` and get_kernel.

    \b
    kernel-builder build kernels/rmsnorm
    kernel-builder wheel kernels/rmsnorm --version 1.3
    pip install --no-deps kernels/rmsnorm/dist/rmsnorm-1.3-py3-none-manylinux_2_28_x86_64.whl
    """
    written = write_wheels(directory, Progress() if as_json else Lines(sys.stderr), **options)
    if as_json:
        click.echo(json.dumps({"wheels": [archive.as_dict() for archive in written]}, indent=2))
    else:
        for archive in written:
            click.echo(f"wrote {archive.path}  ({archive.path.stat().st_size / 2**20:.2f} MiB)")
            click.echo(f"  {', '.join(archive.variants)}; needs {', '.join(archive.requires)}")
