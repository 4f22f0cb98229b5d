"""Signatures by a user's own key: Sigstore bundles that refer to a public key in place of a certificate.

Signing and verification need no network. The public client does not verify these signatures: it reads bundles with
certificates only.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kernel_format.errors import VerificationError

PrivateKey: TypeAlias = Ed25519PrivateKey | EllipticCurvePrivateKey
PublicKey: TypeAlias = Ed25519PublicKey | EllipticCurvePublicKey

_HINT = (
    "make a key with `ssh-keygen -t ed25519 -f signing`: `signing` signs, `signing.pub` verifies; "
    "keys of `openssl genpkey` work as well"
)


def read_private_key(file: Path, ask_passphrase: Callable[[], str]) -> PrivateKey:
    """Read a key of OpenSSH or PEM; the passphrase is asked for only if the file is encrypted.

    Raises:
        VerificationError: If there is no such file or key, or the passphrase is wrong.
    """
    where = f"--key {file}"
    content = _content(file, where)
    load = (
        serialization.load_ssh_private_key
        if b"BEGIN OPENSSH PRIVATE KEY" in content
        else serialization.load_pem_private_key
    )
    wrong = "the private key cannot be read"
    try:
        try:
            key = load(content, None)
        except TypeError:  # the file is encrypted
            wrong = "the passphrase is wrong, or the private key cannot be read"
            key = load(content, ask_passphrase().encode())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise VerificationError(f"{wrong}: {error}", where=where, hint=_HINT) from error
    if isinstance(key, Ed25519PrivateKey) or (
        isinstance(key, EllipticCurvePrivateKey) and isinstance(key.curve, SECP256R1)
    ):
        return key
    raise VerificationError("expected a key of Ed25519 or of ECDSA on P-256", where=where, hint=_HINT)


def read_public_key(file: Path, where: str) -> PublicKey:
    """Read a public key of OpenSSH (a line of a `.pub` file) or PEM.

    Raises:
        VerificationError: If there is no such file or key.
    """
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
    if isinstance(key, Ed25519PublicKey) or (
        isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1)
    ):
        return key
    raise VerificationError("expected a key of Ed25519 or of ECDSA on P-256", where=where, hint=_HINT)


def _content(file: Path, where: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise VerificationError(f"the key cannot be read: {error.strerror}", where=where, hint=_HINT) from error


def fingerprint(key: PublicKey) -> str:
    """Return the SHA-256 of a key, in the form of the hints of Sigstore's bundles."""
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(hashlib.sha256(encoded).digest()).decode()


def key_bundle(content: bytes, key: PrivateKey) -> str:
    """Return a Sigstore bundle with the signature of this content."""
    signature = key.sign(content) if isinstance(key, Ed25519PrivateKey) else key.sign(content, ECDSA(hashes.SHA256()))
    digest = {"algorithm": "SHA2_256", "digest": base64.b64encode(hashlib.sha256(content).digest()).decode()}
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": fingerprint(key.public_key())}, "tlogEntries": []},
        "messageSignature": {"messageDigest": digest, "signature": base64.b64encode(signature).decode()},
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


def is_signed_by(bundle: Mapping[str, Any], content: bytes, keys: Sequence[PublicKey]) -> bool:
    """Return whether one of the keys signed the content."""
    try:
        signature = base64.b64decode(bundle["messageSignature"]["signature"], validate=True)
    except (KeyError, TypeError, ValueError):
        return False
    return any(_verifies(key, signature, content) for key in keys)


def _verifies(key: PublicKey, signature: bytes, content: bytes) -> bool:
    try:
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, content)
        else:
            key.verify(signature, content, ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True
