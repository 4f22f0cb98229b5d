"""`kernel-builder hub`: copy kernels between Hubs and, with torch-kernel-hub installed, serve one."""

from __future__ import annotations

import json

import click

from kernel_builder.cli.plugins import PluginGroup
from kernel_builder.cli.shared_options import json_option
from kernel_builder.hub.merge import merge_pull_request

_OWN = {
    "export": "hub_transfer_command.export",
    "import": "hub_transfer_command.import_",
    "merge": "hub_command.merge",
}


@click.group(
    cls=PluginGroup,
    own=_OWN,
    entry_points="kernel_builder.hub_commands",
    elsewhere=dict.fromkeys(("serve", "check", "gc", "token"), "torch-kernel-hub"),
)
def hub() -> None:
    """Serve your own Hub, and copy kernels between Hubs.

    `huggingface_hub` and `kernels` use it for kernels as they use huggingface.co.

    \b
    kernel-builder hub serve --port 8000 --trust my-org
    HF_ENDPOINT=http://127.0.0.1:8000 HF_TOKEN=any kernel-builder upload my-kernel
    HF_ENDPOINT=http://127.0.0.1:8000 python -c '…get_kernel("my-org/my-kernel", version=1)'
    """


@click.command()
@click.argument("repo_id", metavar="REPO")
@click.argument("number", type=click.IntRange(min=1))
@click.option("--endpoint", metavar="URL", help="The Hub.  [default: $HF_ENDPOINT, or the public Hub]")
@json_option
def merge(repo_id: str, number: int, endpoint: str | None, as_json: bool) -> None:
    """Merge a pull request into its branch.

    \b
    kernel-builder hub merge my-org/my-kernel 1
    """
    commit = merge_pull_request(repo_id, number, endpoint=endpoint)
    click.echo(json.dumps({"commit": commit}) if as_json else f"{repo_id}: pull request {number} is merged ({commit})")
