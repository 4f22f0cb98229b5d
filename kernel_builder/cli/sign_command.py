"""`kernel-builder sign`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
@click.option(
    "--identity-token",
    envvar="SIGSTORE_ID_TOKEN",
    metavar="TOKEN",
    help="A token of an OpenID provider. [default: $SIGSTORE_ID_TOKEN, or else what this machine has]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def sign(directory: Path, identity_token: str | None, as_json: bool) -> None:
    """Sign the packages under DIR/build, so that `kernels verify-signature` accepts them.

    Sigstore signs for an identity, without keys to keep: in continuous integration, the workflow's. Each package gets a
    metadata.json.sigstore. One that has a signature of these bytes already keeps it. Signatures are public, and are
    entered into a public log for good.
    """
    from kernel_builder.cli.check_command import packages_of
    from kernel_builder.hub.signing import sign as write_signatures

    signed = write_signatures(packages_of(directory), identity_token=identity_token)
    if as_json:
        click.echo(json.dumps(signed.as_dict()))
        return
    for name in signed.signed:
        click.echo(f"signed     {name}")
    for name in signed.unchanged:
        click.echo(f"unchanged  {name}")
    if signed.identity:
        click.echo(f"as {signed.identity}")
