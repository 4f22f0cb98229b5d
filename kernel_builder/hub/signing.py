"""Signs packages by Sigstore, as the public client's `kernels verify-signature` reads it, or by the user's key.

The signed file is `metadata.json`, whose digest covers every other file. Sigstore needs no key: it issues a certificate
that is valid for minutes, for an identity that an OpenID provider confirms. In continuous integration this is the
workflow's identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_builder.hub.packages import HubPackage
from kernel_format.errors import CheckError, VerificationError
from kernel_format.files import write_atomically
from kernel_format.signatures import PrivateKey, fingerprint, key_bundle
from kernel_format.tree_digest import SIGNATURE


@dataclass(frozen=True)
class Signed:
    """The result of `sign`: the identity of the signatures, or the key's fingerprint, and the variants."""

    identity: str
    signed: tuple[str, ...]


def sign(packages: Sequence[Path], *, identity_token: str | None = None, key: PrivateKey | None = None) -> Signed:
    """Sign all of the packages, or none; each signature is written beside the package's metadata.

    A package has one signature. An existing one is replaced: anyone could have written it.

    Args:
        identity_token: A token of an OpenID provider that Sigstore trusts. None: the machine's own token, as on GitHub
            and GitLab runners and on Google and Buildkite machines.
        key: The key to sign with instead of Sigstore.

    Raises:
        CheckError: If the files of a package do not match its digest, or it was built for no repository.
        VerificationError: If there is no identity provider, or Sigstore refuses or cannot be reached.
    """
    for package in packages:
        if differences := HubPackage(package).digest_differences:
            raise CheckError(
                f"the package does not match its digest: {'; '.join(differences)}",
                where=str(package),
                hint="rebuild the package; nothing has been signed",
            )
        place = HubPackage(package).metadata.place
        if place and place.get("repo-id") is None:
            raise CheckError(
                "the package was built for no repository, and its signature would verify for none",
                where=str(package),
                hint="name the repository in build.toml ([general.hub] repo-id), build again, and sign again",
            )
    contents = [(package / "metadata.json").read_bytes() for package in packages]
    if key is not None:
        identity = f"key {fingerprint(key.public_key())}"
        signatures = [key_bundle(content, key) for content in contents]
    else:
        identity, signatures = _signatures(contents, identity_token or _ambient_token())
    for package, signature in zip(packages, signatures, strict=True):
        write_atomically(package / SIGNATURE, signature)
    return Signed(identity, tuple(package.name for package in packages))


def _ambient_token() -> str:
    from sigstore.oidc import IdentityError, detect_credential

    try:
        token = detect_credential()
    except IdentityError as error:
        raise VerificationError(
            f"the identity provider of this machine gives no token: {error}",
            where="sign",
            hint="in a GitHub workflow the job needs `permissions: id-token: write`",
        ) from error
    if token is None:
        raise VerificationError(
            "this machine has no identity provider, so Sigstore cannot sign",
            where="sign",
            hint="sign in a job with the permission to request an identity (`id-token: write` on GitHub), or set "
            "$SIGSTORE_ID_TOKEN to a token, or sign with your own key: --key FILE",
        )
    return token


def _signatures(contents: Sequence[bytes], raw_token: str) -> tuple[str, list[str]]:
    """Return the identity of a token, and its signature of each content."""
    from sigstore.models import ClientTrustConfig
    from sigstore.oidc import IdentityToken
    from sigstore.sign import SigningContext

    action = "read the identity token"
    try:
        token = IdentityToken(raw_token)
        action = "fetch Sigstore's roots of trust"
        config = ClientTrustConfig.production()
        action = "sign"
        with SigningContext.from_trust_config(config).signer(token) as signer:
            return token.identity, [signer.sign_artifact(content).to_json() for content in contents]
    except Exception as error:  # Sigstore also raises exceptions of its dependencies
        raise VerificationError(
            f"cannot {action}: {str(error) or type(error).__name__}",
            where="sigstore",
            hint="nothing has been signed; check the token and the connection to Sigstore, and run the command again",
        ) from error
