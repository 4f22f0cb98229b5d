"""`kernel-builder verify`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from kernel_builder.cli.shared_options import json_option, origins
from kernel_builder.hub.verification import VariantVerdict
from kernel_builder.hub.verification import verify as check
from kernel_builder.progress import shown
from kernel_format.errors import VerificationError


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
@json_option
def verify(name: str, as_json: bool, **options: Any) -> None:
    """Check a published kernel.

    The command downloads the packages, compares every file with the digest in the metadata, checks the signature as the
    public client does, and prints the provenance. With --source, it also rebuilds each variant that this machine can
    build, at the commit that the variant names and with an empty cache, and compares the bytes.

    \b
    kernel-builder verify kernels-community/rmsnorm@v1
    kernel-builder verify kernels-community/rmsnorm@v1 --source kernels/rmsnorm
    kernel-builder verify my-org/rmsnorm@v1 --signer signing.pub --require-signature
    """
    with shown(sys.stderr) as progress:
        verification = check(name, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(verification.as_dict(), indent=2))
    else:
        click.echo(f"{verification.repo_id} at {verification.revision}")
        for verdict in verification.variants:
            _print(verdict)
    if not verification.ok:
        sys.exit(VerificationError.exit_code)


def _print(verdict: VariantVerdict) -> None:
    good = click.style("good", fg="green") if verdict.ok else click.style("WRONG", fg="red")
    click.echo(f"{good}  {verdict.variant}")
    click.echo(f"  digest      {'; '.join(verdict.digest) or 'every file matches'}")
    click.echo(f"  signature   {verdict.signature}")
    for line in origins(verdict.provenance):
        click.echo(line)
    if verdict.rebuilt is not None:
        click.echo(f"  rebuilt     {verdict.rebuilt}{': ' if verdict.differing else ''}{', '.join(verdict.differing)}")
