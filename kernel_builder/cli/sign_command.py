"""`kernel-builder sign` and `verify`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from kernel_builder.cli.check_command import packages_of
from kernel_builder.cli.shared_options import directory_argument, json_option, max_size_option, origins
from kernel_builder.hub import verification
from kernel_builder.hub.signing import sign as write_signatures
from kernel_builder.hub.verification import VariantVerdict
from kernel_builder.progress import shown
from kernel_format.errors import VerificationError
from kernel_format.signatures import read_private_key

NOT_VERIFIED = 11


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

    Writes or replaces each package's metadata.json.sigstore, which `kernels verify-signature` reads. Sigstore signs for
    an identity and needs no keys. In continuous integration, the identity is the workflow's; elsewhere,
    $SIGSTORE_ID_TOKEN is the token of an OpenID provider. There is no login in a browser, because the public client
    accepts only signatures of workflows. Sigstore keeps a permanent public log of signatures.

    Signing with --key needs no network. `kernel-builder verify --signer` checks such signatures with the public key;
    the public client cannot check them.

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
        click.echo(json.dumps(asdict(signed)))
        return
    for name in signed.signed:
        click.echo(f"signed  {name}")
    click.echo(f"as {signed.identity}")


@click.command()
@click.argument("name", metavar="REPO[@REVISION]")
@click.option(
    "--source",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="The kernel's project: rebuild it with an empty cache, and compare the bytes.",
)
@click.option(
    "--signer",
    "signers",
    multiple=True,
    metavar="URI|FILE",
    help="A trusted workflow, or a file with a trusted public key; may be repeated. "
    "[default: the workflows that the public client trusts]",
)
@click.option("--require-signature", is_flag=True, help="Fail if a variant has no signature.")
@max_size_option
@json_option
def verify(name: str, as_json: bool, **options: Any) -> None:
    """Check a published kernel and the kernels that it loads.

    The command downloads the packages, compares every file with the digest in the metadata, checks the signature as the
    public client does, and prints the provenance. With --source, it also rebuilds each variant that this machine can
    build, at the commit that the variant names and with an empty cache, and compares the bytes. The exit status is 10
    if a check fails. It is 11 if a variant was not verified, because it was not rebuilt although --source is given, or
    because no --signer names its key.

    \b
    kernel-builder verify kernels-community/rmsnorm@v1
    kernel-builder verify kernels-community/rmsnorm@v1 --source kernels/rmsnorm
    kernel-builder verify my-org/rmsnorm@v1 --signer signing.pub --require-signature
    """
    with shown(sys.stderr) as progress:
        result = verification.verify(name, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(result.as_dict(), indent=2))
    else:
        for kernel in (result, *result.loads):
            click.echo(f"{kernel.repo_id} at {kernel.revision}")
            for verdict in kernel.variants:
                _print_verdict(verdict)
    if not (result.ok and result.is_verified):
        sys.exit(NOT_VERIFIED if result.ok else VerificationError.exit_code)


def _print_verdict(verdict: VariantVerdict) -> None:
    good = click.style("good", fg="green") if verdict.is_verified else click.style("NOT VERIFIED", fg="yellow")
    click.echo(f"{good if verdict.ok else click.style('WRONG', fg='red')}  {verdict.variant}")
    click.echo(f"  digest      {'; '.join(verdict.digest) or 'every file matches'}")
    click.echo(f"  signature   {verdict.signature}")
    for line in origins(verdict.provenance):
        click.echo(line)
    if verdict.rebuilt is not None:
        click.echo(f"  rebuilt     {verdict.rebuilt}{': ' if verdict.differing else ''}{', '.join(verdict.differing)}")
