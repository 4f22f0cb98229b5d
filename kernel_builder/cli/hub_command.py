"""`kernel-builder hub`: copy kernels between Hubs and, with torch-kernel-hub installed, serve one."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from kernel_builder.cli.plugins import PluginGroup
from kernel_builder.cli.shared_options import json_option, max_size_option
from kernel_builder.hub.remote_repository import RemoteRepository
from kernel_builder.hub.transfer import copy_kernels, kernels_of
from kernel_builder.progress import Lines
from kernel_format.errors import SeveralErrors


@click.group(
    cls=PluginGroup,
    own={"import": "hub_command.import_", "merge": "hub_command.merge"},
    entry_points="kernel_builder.hub_commands",
)
def hub() -> None:
    """Serve your own Hub (with torch-kernel-hub installed), and copy kernels between Hubs.

    `huggingface_hub` and `kernels` use it for kernels as they use huggingface.co.

    \b
    kernel-builder hub serve --port 8000 --trust my-org
    HF_ENDPOINT=http://127.0.0.1:8000 HF_TOKEN=any kernel-builder upload my-kernel
    HF_ENDPOINT=http://127.0.0.1:8000 python -c '…get_kernel("my-org/my-kernel", version=1)'
    """


@click.command("import")
@click.argument("source", metavar="REPO|ORG")
@click.option(
    "--from", "origin", metavar="URL", default="https://huggingface.co", show_default=True, help="The Hub to read."
)
@click.option(
    "--endpoint", metavar="URL", envvar="HF_ENDPOINT", show_envvar=True, required=True, help="The Hub to publish to."
)
@click.option("--organization", metavar="ORG", help="The organization to publish to.  [default: the source's]")
@max_size_option
@json_option
def import_(source: str, origin: str, endpoint: str, organization: str | None, max_size: float, as_json: bool) -> None:
    """Copy a kernel of another Hub, or all kernels of an organization.

    Compares all digests of a branch before it sends the branch to the Hub at --endpoint. Each branch that differs gets
    one commit, if its last commit is an import of the same kernel. Prints nothing if nothing is new.

    \b
    kernel-builder hub import kernels-community/rmsnorm --endpoint http://127.0.0.1:8000
    kernel-builder hub import my-org --from http://other-hub:8000 --endpoint http://127.0.0.1:8000
    """
    # The user's token is for the Hub that is published to, and must not be sent to another Hub.
    done, errors = copy_kernels(
        [source] if "/" in source else kernels_of(source, origin),
        Lines(sys.stderr),
        origin=origin,
        organization=organization,
        endpoint=endpoint,
        max_bytes=int(max_size * 1e9),
    )
    if as_json and not errors:  # after an error, the error is the only JSON object
        repositories = [{**asdict(repository), "branches": dict(repository.branches)} for repository in done]
        click.echo(json.dumps({"repositories": repositories}, indent=2))
    elif not as_json:
        for repository in done:
            if repository.updated:
                click.echo(
                    f"{endpoint}: {repository.repo_id}: {', '.join(sorted(repository.updated))}; "
                    f"{repository.files} distinct files, {repository.size / 1e6:.1f} MB"
                )
    if errors:
        raise errors[0] if len(errors) == 1 else SeveralErrors(errors)


@click.command()
@click.argument("repo_id", metavar="REPO")
@click.argument("number", type=click.IntRange(min=1))
@click.argument("commit")
@click.option("--endpoint", metavar="URL", help="The Hub.  [default: $HF_ENDPOINT, or the public Hub]")
@json_option
def merge(repo_id: str, number: int, commit: str, endpoint: str | None, as_json: bool) -> None:
    """Merge a pull request into its branch, if it is still at the commit that you have reviewed.

    The pull request's page shows the changes and the commit.

    \b
    kernel-builder hub merge my-org/my-kernel 1 0d2c5b9f9b1f6f2f6a2a3fd0b1a7c8b5a3d3c1e2
    """
    repository = RemoteRepository(repo_id, endpoint=endpoint)
    repository.require_write()
    merged = repository.merge_pull_request(number, commit)
    click.echo(json.dumps({"commit": merged}) if as_json else f"{repo_id}: pull request {number} is merged ({merged})")
