"""Signing packages, in the format that the public client's `kernels verify-signature` reads.

The signed file is `metadata.json`, whose digest covers every other file. There are no keys to keep: Sigstore issues a
certificate that is valid for minutes, for an identity that an OpenID provider confirms. In continuous integration that
is the workflow's.
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
from kernel_builder.files import write_atomically
from kernel_builder.package.tree_digest import SIGNATURE


@dataclass(frozen=True)
class Signed:
    """The result of `sign`.

    Attributes:
        identity: The identity of the signatures; None if nothing had to be signed.
        signed: Variants that were signed.
        unchanged: Variants that had a signature of the same metadata already.
    """

    identity: str | None
    signed: tuple[str, ...]
    unchanged: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        return asdict(self)


def sign(packages: Sequence[Path], *, identity_token: str | None = None) -> Signed:
    """Sign all of the packages, or none; each signature is written beside the package's metadata.

    Args:
        packages: The directories of the packages.
        identity_token: A token of an OpenID provider that Sigstore trusts. None: the one that the machine offers, as
            runners of GitHub and GitLab, and machines of Google and Buildkite do.

    Raises:
        CheckError: If the files of a package do not match its digest.
        VerificationError: If there is no identity provider, or Sigstore refuses or cannot be reached.
    """
    unchanged: list[Path] = []
    wanted: list[Path] = []
    for package in packages:
        report = checks.run(package, only=("digest",))
        if not report.passed:
            reasons = [f"{f.path} {f.message}" for f in report.findings] or list(report.skipped.values())
            raise CheckError(
                f"the package is not signed, since it does not match its digest: {'; '.join(reasons)}",
                where=str(package),
                hint="build the package again; nothing has been signed",
            )
        (unchanged if _is_signed(package) else wanted).append(package)
    names = tuple(package.name for package in unchanged)
    if not wanted:
        return Signed(None, (), names)
    identity, signatures = _signatures(
        [(package / "metadata.json").read_bytes() for package in wanted], identity_token or _ambient_token()
    )
    for package, signature in zip(wanted, signatures, strict=True):
        write_atomically(package / SIGNATURE, signature)
    return Signed(identity, tuple(package.name for package in wanted), names)


def _is_signed(package: Path) -> bool:
    """Return whether a package has a signature of its current metadata."""
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
            "this machine has no identity provider, so nothing can be signed",
            where="sign",
            hint="sign in continuous integration, in a job that may request an identity (`id-token: write` on GitHub), "
            "or give a token by --identity-token or $SIGSTORE_ID_TOKEN",
        )
    return token


def _signatures(contents: Sequence[bytes], raw_token: str) -> tuple[str, list[str]]:
    """Return the identity of a token, and its signature of each content."""
    from sigstore.models import ClientTrustConfig
    from sigstore.oidc import IdentityToken
    from sigstore.sign import SigningContext

    token = _call_sigstore(lambda: IdentityToken(raw_token), "read the identity token")
    config = _call_sigstore(ClientTrustConfig.production, "fetch Sigstore's roots of trust")

    def signed() -> list[str]:
        with SigningContext.from_trust_config(config).signer(token) as signer:
            return [signer.sign_artifact(content).to_json() for content in contents]

    return token.identity, _call_sigstore(signed, "sign")


def _call_sigstore(function: Callable[[], Any], doing: str) -> Any:
    """Call Sigstore, and turn any exception into an error: it also raises those of its own dependencies."""
    try:
        return function()
    except Exception as error:
        raise VerificationError(
            f"cannot {doing}: {str(error) or type(error).__name__}",
            where="sigstore",
            hint="nothing has been signed; check the token and the connection to Sigstore, then run the command again",
        ) from error
