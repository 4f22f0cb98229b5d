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
    help="A token of an OpenID provider. [default: $SIGSTORE_ID_TOKEN, or else the one that this machine offers]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def sign(directory: Path, identity_token: str | None, as_json: bool) -> None:
    """Sign the packages under DIR/build.

    The signatures are those that `kernels verify-signature` reads. Sigstore signs for an identity, without keys to
    keep; in continuous integration that is the workflow's. Each package gets a metadata.json.sigstore, unless it has
    one for its current metadata. Signatures are public: Sigstore keeps a permanent public log of them.

    \b
    kernel-builder sign kernels/rmsnorm
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
