"""`kernel-builder hub export` and `hub import`, which copy kernels between Hubs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from kernel_builder.cli.shared_options import json_option
from kernel_builder.hub.transfer import Transferred, copy_kernels, export_kernels, import_kernels, kernels_of
from kernel_builder.progress import Lines
from kernel_format.errors import ConfigError, KernelBuilderError, SeveralErrors

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
@click.option("--endpoint", metavar="URL", help="The Hub to read from.  [default: $HF_ENDPOINT, or the public Hub]")
@max_size_option
@json_option
def export(source: str, archive: Path, endpoint: str | None, max_size: float, as_json: bool) -> None:
    """Write a kernel of a Hub, or all kernels of an organization, to one file.

    Every file is compared with the Hub's listing, and every variant with its digest. `hub import` publishes ARCHIVE to
    a Hub that cannot reach this one.

    \b
    kernel-builder hub export kernels-community/rmsnorm rmsnorm.tar
    kernel-builder hub export my-org my-org.tar
    """
    repo_ids = [source] if "/" in source else kernels_of(source, endpoint=endpoint)
    done = export_kernels(
        repo_ids, archive, endpoint=endpoint, max_bytes=int(max_size * 1e9), progress=Lines(sys.stderr)
    )
    _print_transferred(done, str(archive), as_json)


@click.command("import")
@click.argument("source", metavar="ARCHIVE|REPO|ORG")
@click.option("--from", "origin", metavar="URL", help="The Hub that has REPO or ORG.  [default: the public Hub]")
@click.option("--endpoint", metavar="URL", help="The Hub to publish to.  [default: $HF_ENDPOINT]")
@click.option("--organization", metavar="ORG", help="The organization to publish to.  [default: the source's]")
@max_size_option
@json_option
def import_(
    source: str, origin: str | None, endpoint: str | None, organization: str | None, max_size: float, as_json: bool
) -> None:
    """Publish exported kernels, or copy kernels of another Hub.

    They go to the Hub at --endpoint. All digests are compared before anything is sent. Each branch that differs gets
    one commit; unchanged files of another Hub are not downloaded. The command prints nothing if nothing is new, and
    can be repeated at any time, for example by cron. REPO and ORG are read without a token; export private kernels
    first.

    \b
    kernel-builder hub import rmsnorm.tar --endpoint http://127.0.0.1:8000
    kernel-builder hub import kernels-community/rmsnorm --endpoint http://127.0.0.1:8000
    kernel-builder hub import my-org.tar --organization our-org --endpoint http://127.0.0.1:8000
    """
    endpoint = endpoint or os.environ.get("HF_ENDPOINT")
    if not endpoint:
        raise ConfigError(
            "expected the address of the Hub to publish to",
            where="--endpoint",
            hint="--endpoint http://127.0.0.1:8000, or set HF_ENDPOINT",
        )
    errors: Sequence[KernelBuilderError] = ()
    max_bytes = int(max_size * 1e9)
    if Path(source).is_file():
        done = import_kernels(
            Path(source),
            organization=organization,
            endpoint=endpoint,
            max_bytes=max_bytes,
            progress=Lines(sys.stderr),
        )
    else:
        origin = origin or PUBLIC_HUB
        # The user's token is for the Hub that is published to, and must not be sent to another Hub.
        repo_ids = [source] if "/" in source else kernels_of(source, endpoint=origin, token=False)
        done, errors = copy_kernels(
            repo_ids,
            origin=origin,
            organization=organization,
            endpoint=endpoint,
            max_bytes=max_bytes,
            progress=Lines(sys.stderr),
        )
    if not (errors and as_json):  # then the error is the only JSON object
        _print_transferred(done, endpoint, as_json)
    if errors:
        raise errors[0] if len(errors) == 1 else SeveralErrors(errors)


def _print_transferred(done: Sequence[Transferred], where: str, as_json: bool) -> None:
    if as_json:
        repositories = [{**asdict(repository), "branches": dict(repository.branches)} for repository in done]
        click.echo(json.dumps({"repositories": repositories}, indent=2))
        return
    for repository in done:
        if repository.updated:
            click.echo(
                f"{where}: {repository.repo_id}: {', '.join(sorted(repository.updated))}; "
                f"{repository.files} distinct files, {repository.size / 1e6:.1f} MB"
            )
