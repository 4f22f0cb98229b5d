"""Signatures of a package's metadata: by a workflow's identity, as the public client verifies them, or by a key.

A signature by a user's own key is a Sigstore bundle that refers to a public key in place of a certificate. Signing and
verification need no network. The public client does not verify these signatures: it reads bundles with certificates
only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kernel_format.errors import VerificationError
from kernel_format.metadata import NAME, TEXT_BYTES
from kernel_format.tree_digest import SIGNATURE

_SIGNER = re.compile(r"https://github\.com/(?P<repository>[^/]+/[^/]+)/\.github/workflows/[^@]+@.+")
_HINT = (
    "make a key with `ssh-keygen -t ed25519 -f signing`: `signing` signs, `signing.pub` verifies; "
    "keys of `openssl genpkey -algorithm ed25519` work as well"
)
_EXPECTED = "expected a key of Ed25519"
BY_UNKNOWN_KEY = "not verified: by a key; name the signer's public key with --signer"
FOR_NO_REPOSITORY = "not verified: signed for no repository"
UNVERIFIED = (BY_UNKNOWN_KEY, FOR_NO_REPOSITORY)

PrivateKey = Ed25519PrivateKey


def read_private_key(file: Path, ask_passphrase: Callable[[], str]) -> Ed25519PrivateKey:
    """Read a key of OpenSSH or PEM; the passphrase is asked for only if the file is encrypted.

    Raises:
        VerificationError: If there is no such file or key, or the passphrase is wrong.
    """
    where = f"--key {file}"
    content = _content(file, where)
    is_ssh = b"BEGIN OPENSSH PRIVATE KEY" in content
    load = serialization.load_ssh_private_key if is_ssh else serialization.load_pem_private_key
    wrong = "the private key cannot be read"
    try:
        try:
            key = load(content, None)
        except TypeError:  # the file is encrypted
            wrong = "the passphrase is wrong, or the private key cannot be read"
            key = load(content, ask_passphrase().encode())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise VerificationError(f"{wrong}: {error}", where=where, hint=_HINT) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise VerificationError(_EXPECTED, where=where, hint=_HINT)
    return key


def _read_public_key(file: Path, where: str) -> Ed25519PublicKey:
    """Read a public key of OpenSSH (a line of a `.pub` file) or PEM."""
    content = _content(file, where)
    if b"PRIVATE KEY" in content:
        raise VerificationError(
            "is a private key; expected the public key", where=where, hint=f"keep it secret, and name {file}.pub"
        )
    load = serialization.load_pem_public_key if b"-----BEGIN" in content else serialization.load_ssh_public_key
    try:
        key = load(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise VerificationError(f"the public key cannot be read: {error}", where=where, hint=_HINT) from error
    if not isinstance(key, Ed25519PublicKey):
        raise VerificationError(_EXPECTED, where=where, hint=_HINT)
    return key


def _content(file: Path, where: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise VerificationError(f"the key cannot be read: {error.strerror}", where=where, hint=_HINT) from error


def fingerprint(key: Ed25519PublicKey) -> str:
    """Return the SHA-256 of a key, in the form of the hints of Sigstore's bundles."""
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(hashlib.sha256(encoded).digest()).decode()


def key_bundle(content: bytes, key: Ed25519PrivateKey) -> str:
    """Return a Sigstore bundle with the signature of this content."""
    digest = {"algorithm": "SHA2_256", "digest": base64.b64encode(hashlib.sha256(content).digest()).decode()}
    signature = base64.b64encode(key.sign(content)).decode()
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": fingerprint(key.public_key())}, "tlogEntries": []},
        "messageSignature": {"messageDigest": digest, "signature": signature},
    }
    return json.dumps(bundle)


def read_bundle(file: Path) -> Mapping[str, Any]:
    """Return a bundle, or an empty mapping if the file is not a bundle."""
    try:
        bundle = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return bundle if isinstance(bundle, dict) else {}


def refers_to_key(bundle: Mapping[str, Any]) -> bool:
    """Return whether a bundle refers to a public key in place of a certificate."""
    material = bundle.get("verificationMaterial")
    return isinstance(material, dict) and "publicKey" in material


def is_signed_by(bundle: Mapping[str, Any], content: bytes, keys: Sequence[Ed25519PublicKey]) -> bool:
    """Return whether one of the keys signed the content."""
    for key in keys:
        try:
            key.verify(base64.b64decode(bundle["messageSignature"]["signature"], validate=True), content)
        except (KeyError, TypeError, ValueError, InvalidSignature):
            continue
        return True
    return False


@dataclass(frozen=True)
class Signers:
    """The trusted signers, workflows by address. Without any, the workflows that the public client trusts."""

    workflows: tuple[str, ...] = ()
    keys: tuple[Ed25519PublicKey, ...] = ()

    @property
    def names(self) -> list[str]:
        """The addresses, and the fingerprints of the keys, sorted."""
        return sorted([*self.workflows, *map(fingerprint, self.keys)])


def read_signers(signers: Sequence[str]) -> Signers:
    """Read signers, each the address of a workflow or the path of a file with a public key.

    Raises:
        VerificationError: If a signer is neither.
    """
    keys: list[Ed25519PublicKey] = []
    workflows: list[str] = []
    for signer in signers:
        if _SIGNER.fullmatch(signer):
            workflows.append(signer)
        elif "://" not in signer and Path(signer).exists():
            keys.append(_read_public_key(Path(signer), f"--signer {signer}"))
        else:
            raise VerificationError(
                "neither the address of a workflow, https://github.com/ORG/REPO/.github/workflows/FILE@REF, nor a file "
                "with a public key",
                where=f"--signer {signer}",
            )
    return Signers(tuple(workflows), tuple(keys))


def signature_verdict(package: Path, signers: Signers) -> str:
    """Verify the signature of a package's metadata; the package's digest is checked on its own.

    Returns:
        `valid`, `none` without a signature, `BY_UNKNOWN_KEY` without a key to verify it, or the fault.
    """
    if not (package / SIGNATURE).is_file():
        return "none"
    for name in (SIGNATURE, NAME):
        if (package / name).is_file() and (package / name).stat().st_size > TEXT_BYTES:
            return f"{name} has more than {TEXT_BYTES} bytes"
    bundle = read_bundle(package / SIGNATURE)
    if not refers_to_key(bundle):
        if signers.keys and not signers.workflows:
            return "not by one of the trusted keys"
        return _clients_verdict(package, signers.workflows)
    if not signers.keys:
        return BY_UNKNOWN_KEY
    try:
        signed = is_signed_by(bundle, (package / "metadata.json").read_bytes(), signers.keys)
    except OSError:
        return "there is no metadata.json"
    return "valid" if signed else "not by one of the trusted keys, or of another metadata.json"


def _clients_verdict(package: Path, workflows: Sequence[str]) -> str:
    from kernels.verify import DEFAULT_POLICIES, GitHubWorkflowPolicy, VerificationResult, verify_variant

    policies = []
    for workflow in workflows:
        match = _SIGNER.fullmatch(workflow)
        assert match is not None
        policies.append(GitHubWorkflowPolicy(repo_id=match["repository"], signer_uris=[workflow]))
    try:
        result = verify_variant(package, policies or DEFAULT_POLICIES)
    except Exception as error:  # the client raises any exception of its dependencies if Sigstore cannot be reached
        text = f"cannot be checked: {str(error) or type(error).__name__}"
    else:
        if isinstance(result, (VerificationResult.Success, VerificationResult.DigestVerificationFailure)):
            return "valid"
        text = str(getattr(result, "reason", type(result).__name__))
    return " ".join(text.split())[:400]  # it quotes the bundle, whose lines could look like verdicts
