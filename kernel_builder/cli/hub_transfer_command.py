"""`kernel-builder hub export` and `hub import`, which copy kernels between Hubs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kernel_builder.cli.shared_options import json_option
from kernel_builder.progress import Lines
from kernel_format.errors import ConfigError

if TYPE_CHECKING:
    from kernel_builder.hub.transfer import Transferred

PUBLIC_HUB = "https://huggingface.co"


max_size_option = click.option(
    "--max-size",
    type=click.FloatRange(min=0),
    default=10,
    show_default=True,
    metavar="GB",
    help="Refuse to transfer more than this.",
)


@click.command("export")
@click.argument("source", metavar="REPO|ORG")
@click.argument("archive", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--branch", "branches", multiple=True, help="Only this branch; may be given more than once.")
@click.option("--endpoint", metavar="URL", help="The Hub to read from.  [default: $HF_ENDPOINT, or the public Hub]")
@max_size_option
@json_option
def export(
    source: str, archive: Path, branches: tuple[str, ...], endpoint: str | None, max_size: float, as_json: bool
) -> None:
    """Write a kernel of a Hub, or all kernels of an organisation, to one file.

    Every file is compared with the Hub's listing, and every variant with its digest. `hub import` publishes ARCHIVE to
    a Hub that cannot reach this one.

    \b
    kernel-builder hub export kernels-community/rmsnorm rmsnorm.tar
    kernel-builder hub export my-org my-org.tar
    """
    from kernel_builder.hub.transfer import export_kernels, kernels_of

    repo_ids = [source] if "/" in source else kernels_of(source, endpoint=endpoint)
    done = export_kernels(
        repo_ids,
        archive,
        endpoint=endpoint,
        branches=branches,
        max_bytes=int(max_size * 1e9),
        progress=Lines(sys.stderr),
    )
    _print_transferred(done, str(archive), as_json)


@click.command("import")
@click.argument("source", metavar="ARCHIVE|REPO|ORG")
@click.option("--from", "origin", metavar="URL", help="The Hub that has REPO or ORG.  [default: the public Hub]")
@click.option("--endpoint", metavar="URL", help="The Hub to publish to.  [default: $HF_ENDPOINT]")
@click.option("--repo-id", help="The repository to publish to.  [default: the exported one]")
@click.option("--organization", metavar="ORG", help="The organisation to publish to.  [default: the exported one]")
@click.option("--private", is_flag=True, help="Make repositories private, if they are created.")
@max_size_option
@json_option
def import_(
    source: str,
    origin: str | None,
    endpoint: str | None,
    repo_id: str | None,
    organization: str | None,
    private: bool,
    max_size: float,
    as_json: bool,
) -> None:
    """Publish exported kernels, or those of another Hub.

    They go to the Hub at --endpoint. All digests are compared before anything is sent. Each branch that differs gets
    one commit, so the command can be repeated after an error. What was private is created as private. REPO and ORG are
    downloaded without a token; if they need one, export them first.

    \b
    kernel-builder hub import rmsnorm.tar --endpoint http://127.0.0.1:8000
    kernel-builder hub import kernels-community/rmsnorm --endpoint http://127.0.0.1:8000
    kernel-builder hub import my-org.tar --organization our-org --endpoint http://127.0.0.1:8000
    """
    from kernel_builder.hub.transfer import export_kernels, import_kernels, kernels_of
    from kernel_format.files import temporary_directory

    endpoint = endpoint or os.environ.get("HF_ENDPOINT")
    if not endpoint:
        raise ConfigError(
            "expected the address of the Hub to publish to",
            where="--endpoint",
            hint="--endpoint http://127.0.0.1:8000, or set HF_ENDPOINT",
        )
    with temporary_directory() as temporary:
        archive = Path(source)
        if not archive.is_file():
            archive = temporary / "kernel.tar"
            there = origin or PUBLIC_HUB
            # The user's token is for the Hub that is published to, and must not be sent to another Hub.
            repo_ids = [source] if "/" in source else kernels_of(source, endpoint=there, token=False)
            export_kernels(
                repo_ids,
                archive,
                endpoint=there,
                token=False,
                max_bytes=int(max_size * 1e9),
                progress=Lines(sys.stderr),
            )
        done = import_kernels(
            archive,
            repo_id=repo_id,
            organization=organization,
            endpoint=endpoint,
            private=private,
            max_bytes=int(max_size * 1e9),
            progress=Lines(sys.stderr),
        )
    _print_transferred(done, endpoint, as_json)


def _print_transferred(done: Sequence[Transferred], where: str, as_json: bool) -> None:
    if as_json:
        repositories = [{**asdict(repository), "branches": dict(repository.branches)} for repository in done]
        # The fields of a single repository are also where earlier versions had them.
        click.echo(json.dumps({"repositories": repositories, **(repositories[0] if len(done) == 1 else {})}, indent=2))
        return
    for repository in done:
        branches = ", ".join(sorted(repository.branches))
        click.echo(
            f"{where}: {repository.repo_id}: {branches}; {repository.files} distinct files, "
            f"{repository.size / 1e6:.1f} MB"
        )
