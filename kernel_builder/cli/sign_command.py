"""`kernel-builder sign`."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import click

from kernel_builder.cli.check_command import packages_of
from kernel_builder.cli.shared_options import directory_argument, json_option
from kernel_builder.hub.signing import sign as write_signatures
from kernel_format.signatures import read_private_key


@click.command()
@directory_argument
@click.option(
    "--key",
    "key_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Sign with this private key instead of Sigstore: Ed25519, from ssh-keygen or openssl.",
)
@json_option
def sign(directory: Path, key_file: Path | None, as_json: bool) -> None:
    """Sign the packages under DIR/build.

    `kernels verify-signature` reads the signatures. Sigstore signs for an identity, without keys to keep; in continuous
    integration the identity is the workflow's, elsewhere $SIGSTORE_ID_TOKEN is the token of an OpenID provider. Each
    package gets a metadata.json.sigstore, unless it has one for its current metadata. Signatures are public: Sigstore
    keeps a permanent public log of them. The public client accepts only signatures of workflows, so there is no login
    in a browser.

    --key needs no network. `kernel-builder verify --signer` checks such signatures with the public key; the public
    client cannot.

    \b
    kernel-builder sign kernels/rmsnorm
    SIGSTORE_ID_TOKEN=$(cat /run/secrets/oidc-token) kernel-builder sign kernels/rmsnorm
    kernel-builder sign kernels/rmsnorm --key signing    # from `ssh-keygen -t ed25519 -f signing`
    """
    key = None
    if key_file is not None:
        ask = partial(click.prompt, f"Passphrase of {key_file}", hide_input=True, err=True)
        key = read_private_key(key_file, ask)
    packages = packages_of(directory)
    signed = write_signatures(packages, identity_token=os.environ.get("SIGSTORE_ID_TOKEN"), key=key)
    if as_json:
        click.echo(json.dumps(signed.as_dict()))
        return
    for name in signed.signed:
        click.echo(f"signed     {name}")
    for name in signed.unchanged:
        click.echo(f"unchanged  {name}")
    if signed.identity:
        click.echo(f"as {signed.identity}")
