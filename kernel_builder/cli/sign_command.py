"""`kernel-builder sign`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import click

from kernel_builder.cli.shared_options import directory_argument, json_option
from kernel_format.errors import VerificationError

_HINT = "name a file that has a token of an OpenID provider, and nothing else"


@click.command()
@directory_argument
@click.option(
    "--identity-token",
    envvar="SIGSTORE_ID_TOKEN",
    metavar="TOKEN",
    help="A token of an OpenID provider. [default: $SIGSTORE_ID_TOKEN, or else the one that this machine offers]",
)
@click.option(
    "--identity-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A file with such a token, as clusters and runners mount it; `-` is standard input.",
)
@click.option(
    "--key",
    "key_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Sign with this private key in place of Sigstore: Ed25519 or ECDSA P-256, of ssh-keygen or openssl.",
)
@json_option
def sign(
    directory: Path, identity_token: str | None, identity_file: Path | None, key_file: Path | None, as_json: bool
) -> None:
    """Sign the packages under DIR/build.

    The signatures are those that `kernels verify-signature` reads. Sigstore signs for an identity, without keys to
    keep; in continuous integration that is the workflow's. Each package gets a metadata.json.sigstore, unless it has
    one for its current metadata. Signatures are public: Sigstore keeps a permanent public log of them. The public
    client accepts the signatures of workflows alone, so there is no login in a browser.

    With --key nothing is asked of a network, so a Hub without one can have signed packages. `kernel-builder verify
    --signer` and `hub serve --mirror-signer` check them by the public key; the public client cannot.

    \b
    kernel-builder sign kernels/rmsnorm
    kernel-builder sign kernels/rmsnorm --identity-file /run/secrets/oidc-token
    kernel-builder sign kernels/rmsnorm --key signing    # of `ssh-keygen -t ed25519 -f signing`
    """
    from kernel_builder.cli.check_command import packages_of
    from kernel_builder.hub.signing import sign as write_signatures
    from kernel_format.key_signatures import read_private_key

    key = None
    if key_file is not None:
        if identity_file is not None:
            raise click.UsageError("--key and --identity-file exclude each other")
        ask = partial(click.prompt, f"Passphrase of {key_file}", hide_input=True, err=True)
        key = read_private_key(key_file, ask)
    packages = packages_of(directory)
    if identity_file is not None:
        identity_token = _token_in(identity_file)
    signed = write_signatures(packages, identity_token=identity_token, key=key)
    if as_json:
        click.echo(json.dumps(signed.as_dict()))
        return
    for name in signed.signed:
        click.echo(f"signed     {name}")
    for name in signed.unchanged:
        click.echo(f"unchanged  {name}")
    if signed.identity:
        click.echo(f"as {signed.identity}")


def _token_in(file: Path) -> str:
    try:
        token: str = click.open_file(str(file), encoding="ascii").read().strip()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise VerificationError(
            f"the token cannot be read: {reason}", where=f"--identity-file {file}", hint=_HINT
        ) from error
    if not token:
        raise VerificationError("the file is empty", where=f"--identity-file {file}", hint=_HINT)
    return token
