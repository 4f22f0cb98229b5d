"""The public client's verdict on the signature of a package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kernel_builder.errors import VerificationError
from kernel_builder.package.tree_digest import SIGNATURE

_SIGNER = re.compile(r"https://github\.com/(?P<repository>[^/]+/[^/]+)/\.github/workflows/[^@]+@.+")


def check_signers(signers: Sequence[str]) -> None:
    """Check that every signer is the address of a workflow.

    Raises:
        VerificationError: If one is not.
    """
    for signer in signers:
        if not _SIGNER.fullmatch(signer):
            raise VerificationError(
                "not the address of a workflow; expected https://github.com/ORG/REPO/.github/workflows/FILE@REF",
                where=f"--signer {signer}",
            )


def signature_verdict(package: Path, signers: Sequence[str]) -> str:
    """Verify the signature of a package's metadata; the package's digest is checked on its own.

    Args:
        package: The directory; of its files, only the metadata and the signature are needed.
        signers: Addresses of the workflows that may have signed. Empty: those that the public client trusts.

    Returns:
        `valid`, `none` without a signature, or what is wrong.

    Raises:
        VerificationError: If a signer is not the address of a workflow.
    """
    if not (package / SIGNATURE).is_file():
        return "none"
    from kernels.verify import DEFAULT_POLICIES, GitHubWorkflowPolicy, VerificationResult, verify_variant

    check_signers(signers)
    policies = []
    for signer in signers:
        match = _SIGNER.fullmatch(signer)
        assert match is not None
        policies.append(GitHubWorkflowPolicy(repo_id=match["repository"], signer_uris=[signer]))
    try:
        result = verify_variant(package, policies or DEFAULT_POLICIES)
    except Exception as error:  # the client raises any exception of its dependencies if Sigstore cannot be reached
        return f"cannot be checked: {str(error) or type(error).__name__}"
    if isinstance(result, (VerificationResult.Success, VerificationResult.DigestVerificationFailure)):
        return "valid"
    return str(getattr(result, "reason", type(result).__name__))
