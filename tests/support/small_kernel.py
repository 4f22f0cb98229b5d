"""A small kernel in the builder's layout, for tests that need no compiler."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from kernels_data import Digest, DigestAlgorithm

from tests.support.running_hub import RunningHub

VARIANT = "torch-cpu"
KERNEL = "kernels-community/twice"


def write_kernel(directory: Path, *, repo_id: str = KERNEL, version: int = 1, factor: int = 2) -> Path:
    """Write a Python-only kernel with the function `twice(x)` and one large file."""
    variant = directory / "build" / VARIANT
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text(f"def twice(x):\n    return x * {factor}\n\n\n__all__ = ['twice']\n")
    (variant / "table.bin").write_bytes(bytes(range(256)) * 5000)
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    metadata = {
        "id": f"_twice_{factor}",
        "name": repo_id.partition("/")[2],
        "version": version,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": dict(digest.files)},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2))
    return directory


def commit(api: HfApi, repo_id: str, path: str, content: bytes = b"x", **options: object) -> CommitInfo:
    """Commit one file with the public client."""
    return api.create_commit(  # type: ignore[no-any-return]
        repo_id, [CommitOperationAdd(path, content)], commit_message=path, repo_type="kernel", **options
    )


def publish_kernel(
    hub: RunningHub,
    directory: Path,
    token: str | None = "any",
    repo_id: str = KERNEL,
    *,
    branch: str = "v1",
    **options: bool,
) -> str:
    """Publish a directory with the client's own calls, and return the commit; `options` are those of `create_repo`."""
    api = hub.api(token)
    api.create_repo(repo_id, repo_type="kernel", exist_ok=True, **options)
    api.create_branch(repo_id, branch=branch, repo_type="kernel", exist_ok=True)
    return str(api.upload_folder(repo_id=repo_id, folder_path=directory, repo_type="kernel", revision=branch).oid)
