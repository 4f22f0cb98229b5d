"""`kernel-builder upload` and `build-and-upload`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kernel_builder.hub.publication import Listener, Published, Request, Written
from kernel_builder.hub.publish import publish

_OPTIONS = (
    click.argument("directory", metavar="[DIR]", default=".", type=click.Path(path_type=Path)),
    click.option(
        "--repo-id", metavar="ORG/NAME", help="The repository. [default: [general.hub] repo-id of build.toml]"
    ),
    click.option("--branch", metavar="NAME", help="The branch for the builds. [default: v<version>]"),
    click.option("--private", is_flag=True, help="Make the repository a private one, if it is new."),
    click.option("--create-pr", is_flag=True, help="Open pull requests instead of committing."),
    click.option("--prune", is_flag=True, help="Remove the variants on the branch that are not in DIR/build."),
    click.option("--message", metavar="TEXT", help="The first line of the commits."),
    click.option("--card-note", metavar="TEXT", help="A sentence for the card, such as how the packages were tested."),
    click.option("--dry-run", is_flag=True, help="Check and compare, say what would be done, and write nothing."),
    click.option("--load/--no-load", default=True, help="Load each package that this machine can load, as a check."),
    click.option("--quiet", "-q", is_flag=True, help="Say nothing but errors."),
    click.option("--output-json", "--json", "as_json", is_flag=True, help="Print the result as JSON."),
)


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class _Lines(Listener):
    def say(self, message: str) -> None:
        click.echo(message, err=True)


@click.command()
@_options
def upload(directory: Path, quiet: bool, as_json: bool, **options: Any) -> None:
    """Publish the packages of the project in DIR (default: here) to a repository on a Hub.

    Every check runs first. The builds become one commit on the branch of their version, the sources and the card one on
    main. Variants on the branch that are not in DIR/build stay. What is there already is not sent again, so that the
    same command finishes what was cut off.

    The Hub is $HF_ENDPOINT, or else huggingface.co; the token is $HF_TOKEN, or else that of `hf auth login`.

    \b
    kernel-builder upload kernels/rmsnorm --dry-run
    kernel-builder upload kernels/rmsnorm
    HF_ENDPOINT=http://127.0.0.1:8080 kernel-builder upload kernels/rmsnorm --repo-id me/rmsnorm
    """
    _upload(Request(directory, **options), quiet=quiet, as_json=as_json)


@click.command()
@_options
@click.option("--variant", "variants", multiple=True, metavar="NAME", help="Build only this variant; may be repeated.")
@click.option(
    "--backend", "backends", multiple=True, type=click.Choice(["cpu", "cuda"]), help="Build only for this backend."
)
@click.option("--all", "whole", is_flag=True, help="Build the whole matrix, not only what the Hub asks for.")
@click.option("-j", "--jobs", "--max-jobs", type=click.IntRange(min=1), help="Processors to use at most.")
def build_and_upload(
    directory: Path,
    quiet: bool,
    as_json: bool,
    variants: tuple[str, ...],
    backends: tuple[str, ...],
    whole: bool,
    jobs: int | None,
    **options: Any,
) -> None:
    """Build the project in DIR (default: here) as `build` does, then publish it as `upload` does.

    What DIR/build holds besides, such as the variants of another machine, is published too.
    """
    from kernel_builder import pipeline
    from kernel_builder.cli.build_command import print_summary, run
    from kernel_builder.toolchain import Toolchains, compiler_cache

    summary = run(
        pipeline.BuildRequest(
            directories=(directory,),
            variants=variants,
            backends=backends,
            whole=whole,
            jobs=jobs,
            compiler_cache=compiler_cache.find("auto"),
            load=options["load"],
        ),
        Toolchains,
    )
    if not (as_json or quiet):
        print_summary(summary)
    _upload(Request(directory, **options), quiet=quiet, as_json=as_json)


def _upload(request: Request, *, quiet: bool, as_json: bool) -> None:
    from huggingface_hub.utils import disable_progress_bars

    if quiet or as_json:
        disable_progress_bars()
    published = publish(request, Listener() if quiet else _Lines())
    if as_json:
        click.echo(json.dumps(published.as_dict(), indent=2))
    elif not quiet:
        _print(published)


def _print(published: Published) -> None:
    for names, what in (
        (published.variants, "would be published" if published.dry_run else "published"),
        (published.kept, "kept"),
        (published.removed, "removed"),
    ):
        for name in names:
            dirty = "  (built from sources or by a builder with uncommitted changes)" if name in published.dirty else ""
            click.echo(f"{what:<10} {name}{dirty}")
    for line in published.api_changes:
        click.secho(f"API: {line}", fg="yellow")
    for written in (published.builds, published.main):
        if written:
            click.echo(_told(written, published.dry_run))
    if published.note:
        click.echo(published.note)
    click.echo(published.url)


def _told(written: Written, dry_run: bool) -> str:
    if not written.sent and not written.removed:
        return f"{written.branch}: nothing to do, {written.unchanged} files are there already"
    said = (
        f"{written.branch}: {len(written.sent)} files {'to send' if dry_run else 'sent'} "
        f"({written.bytes / 2**20:.1f} MiB), {written.unchanged} unchanged, {len(written.removed)} removed"
    )
    return f"{said}\n  {written.pull_request or written.url}" if written.url else said
