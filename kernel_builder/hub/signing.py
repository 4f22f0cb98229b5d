"""Signatures of packages, as the public client's `kernels verify-signature` reads them.

What is signed is `metadata.json`, whose digest covers every other file. There are no keys to keep: `sigstore` asks for
a certificate that lives for minutes, for the identity that an identity provider vouches for. In continuous integration
that is the workflow itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernel_builder import checks
from kernel_builder.errors import CheckError, VerificationError
from kernel_builder.package.tree_digest import SIGNATURE


@dataclass(frozen=True)
class Signed:
    """What `sign` did.

    Attributes:
        identity: Whom the identity provider vouched for; None if nothing had to be signed.
        signed: Variants that got a signature.
        unchanged: Variants that had one of these bytes already.
    """

    identity: str | None
    signed: tuple[str, ...]
    unchanged: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The result as `--json` prints it."""
        return asdict(self)


def sign(packages: Sequence[Path], *, identity_token: str | None = None) -> Signed:
    """Write the signature of each package beside its metadata: of all of them, or of none.

    Args:
        identity_token: A token of an OpenID provider that Sigstore knows. None: what the machine has, as GitHub's and
            GitLab's runners and Google's and Buildkite's machines do.

    Raises:
        CheckError: If a package is not what its digest says: that must not be signed.
        VerificationError: If there is no identity provider, or Sigstore cannot be reached or refuses.
    """
    unchanged: list[Path] = []
    wanted: list[Path] = []
    for package in packages:
        report = checks.run(package, only=("digest",))
        if not report.passed:
            reasons = [f"{f.path} {f.message}" for f in report.findings] or list(report.skipped.values())
            raise CheckError(
                f"is not signed, since it is not what its digest says: {'; '.join(reasons)}",
                where=str(package),
                hint="build it again; nothing has been signed",
            )
        (unchanged if _is_signed(package) else wanted).append(package)
    names = tuple(package.name for package in unchanged)
    if not wanted:
        return Signed(None, (), names)
    identity, signatures = _signatures(
        [(package / "metadata.json").read_bytes() for package in wanted], identity_token or _ambient_token()
    )
    for package, signature in zip(wanted, signatures, strict=True):
        temporary = package.parent / f".{package.name}.{SIGNATURE}"
        temporary.write_text(signature, encoding="utf-8")
        temporary.replace(package / SIGNATURE)
    return Signed(identity, tuple(package.name for package in wanted), names)


def _is_signed(package: Path) -> bool:
    """Whether the signature that a package has is one of its metadata as it is."""
    try:
        bundle = json.loads((package / SIGNATURE).read_bytes())
        digest = base64.b64decode(bundle["messageSignature"]["messageDigest"]["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return digest == hashlib.sha256((package / "metadata.json").read_bytes()).digest()


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
            "there is no identity provider here, so that nothing can be signed",
            where="sign",
            hint="sign in continuous integration, in a job that may ask for an identity (`id-token: write` on GitHub), "
            "or give a token by --identity-token or $SIGSTORE_ID_TOKEN",
        )
    return token


def _signatures(contents: Sequence[bytes], raw_token: str) -> tuple[str, list[str]]:
    """The identity that a token stands for, and a signature by it of each content."""
    from sigstore.models import ClientTrustConfig
    from sigstore.oidc import IdentityToken
    from sigstore.sign import SigningContext

    token = _reached(lambda: IdentityToken(raw_token), "read the identity token")
    config = _reached(ClientTrustConfig.production, "fetch Sigstore's roots of trust")

    def signed() -> list[str]:
        with SigningContext.from_trust_config(config).signer(token) as signer:
            return [signer.sign_artifact(content).to_json() for content in contents]

    return token.identity, _reached(signed, "sign")


def _reached(ask: Callable[[], Any], doing: str) -> Any:
    """What Sigstore answers; its libraries raise whatever their own libraries do."""
    try:
        return ask()
    except Exception as error:
        raise VerificationError(
            f"cannot {doing}: {str(error) or type(error).__name__}",
            where="sigstore",
            hint="nothing has been signed; check the token and that Sigstore can be reached, then run the same again",
        ) from error
