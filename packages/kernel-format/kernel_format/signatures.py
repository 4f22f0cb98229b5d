"""Verification of a package's signature: by the public client, or by a key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_format.errors import VerificationError
from kernel_format.key_signatures import (
    PublicKey,
    fingerprint,
    is_signed_by,
    read_bundle,
    read_public_key,
    refers_to_key,
)
from kernel_format.tree_digest import SIGNATURE

_SIGNER = re.compile(r"https://github\.com/(?P<repository>[^/]+/[^/]+)/\.github/workflows/[^@]+@.+")


@dataclass(frozen=True)
class Signers:
    """The trusted signers. Without any, the workflows that the public client trusts.

    Attributes:
        workflows: Addresses of workflows.
        keys: Public keys.
    """

    workflows: tuple[str, ...] = ()
    keys: tuple[PublicKey, ...] = ()

    @property
    def names(self) -> list[str]:
        """The addresses, and the fingerprints of the keys, sorted."""
        return sorted([*self.workflows, *map(fingerprint, self.keys)])


def read_signers(signers: Sequence[str]) -> Signers:
    """Read signers, each the address of a workflow or the path of a file with a public key.

    Raises:
        VerificationError: If a signer is neither.
    """
    keys: list[PublicKey] = []
    workflows: list[str] = []
    for signer in signers:
        if _SIGNER.fullmatch(signer):
            workflows.append(signer)
        elif "://" not in signer and Path(signer).exists():
            keys.append(read_public_key(Path(signer), f"--signer {signer}"))
        else:
            raise VerificationError(
                "neither the address of a workflow, https://github.com/ORG/REPO/.github/workflows/FILE@REF, nor a file "
                "with a public key",
                where=f"--signer {signer}",
            )
    return Signers(tuple(workflows), tuple(keys))


def signature_verdict(package: Path, signers: Signers) -> str:
    """Verify the signature of a package's metadata; the package's digest is checked on its own.

    Args:
        package: The directory; of its files, only the metadata and the signature are needed.
        signers: The trusted signers.

    Returns:
        `valid`, `none` without a signature, or the fault.
    """
    if not (package / SIGNATURE).is_file():
        return "none"
    bundle = read_bundle(package / SIGNATURE)
    if refers_to_key(bundle):
        return _verdict_by_keys(package, bundle, signers.keys)
    if signers.keys and not signers.workflows:
        return "not by one of the trusted keys"
    return _clients_verdict(package, signers.workflows)


def _verdict_by_keys(package: Path, bundle: Mapping[str, Any], keys: Sequence[PublicKey]) -> str:
    if not keys:
        return "by a key, but no key is trusted; name the signer's public key"
    try:
        metadata = (package / "metadata.json").read_bytes()
    except OSError:
        return "there is no metadata.json"
    signed = is_signed_by(bundle, metadata, keys)
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
        return f"cannot be checked: {str(error) or type(error).__name__}"
    if isinstance(result, (VerificationResult.Success, VerificationResult.DigestVerificationFailure)):
        return "valid"
    return str(getattr(result, "reason", type(result).__name__))
