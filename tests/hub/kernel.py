"""A small kernel in the builder's layout, for tests that need no compiler."""

from __future__ import annotations

import json
from pathlib import Path

from kernels_data import Digest, DigestAlgorithm

VARIANT = "torch-cpu"


def write_kernel(
    directory: Path, *, repo_id: str = "kernels-community/twice", version: int = 1, factor: int = 2
) -> Path:
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
