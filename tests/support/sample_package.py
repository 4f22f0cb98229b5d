"""A minimal kernel, and packages of it as the builder would write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from kernels_data import Digest, DigestAlgorithm

from kernel_builder.checks import CHECKS, Finding, ProbeProcess, run_all
from kernel_builder.config.variant import Variant, this_platform
from tests.support.files import write_files
from tests.support.places import SOURCES

TORCH = Path(torch.__file__).parent
STABLE_CPU = f"torch-stable-abi210-cpu-{this_platform()}"
STABLE_CUDA = f"torch-stable-abi210-cu130-{this_platform()}"

# An op that counts elements, by the C functions of the stable ABI, and an empty Python module.
SOURCE = SOURCES["counting_op"]

Compile = Callable[..., Path]
Make = Callable[..., Path]


def identity(variant: str) -> str:
    return f"_demo_kernel_{Variant.parse(variant).backend}_1"


def assemble(
    build: Path, variant: str, module: Path | None, files: Mapping[str, str] | None = None, **metadata: object
) -> Path:
    """Write the package of `variant` under `build`; `files` and `metadata` override those of a valid package."""
    directory = build / variant
    parsed = Variant.parse(variant)
    archs = {"archs": ["9.0"]} if parsed.release else {}
    contents = {
        "__init__.py": SOURCES["counting_module"] if module else "import torch\n",
        "_ops.py": SOURCES["counting_ops"].format(id=identity(variant)),
        "demo_kernel/__init__.py": "import sys\n",
        **(files or {}),
    }
    write_files(directory, contents)
    if module:
        (directory / f"{identity(variant)}.abi3.so").write_bytes(module.read_bytes())
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, directory)
    described = {
        "id": identity(variant),
        "name": "demo-kernel",
        "version": 1,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": parsed.backend.name, **archs},
        "digest": {"algorithm": "sha256", "files": digest.files},
        **metadata,
    }
    (directory / "metadata.json").write_text(json.dumps({k: v for k, v in described.items() if v is not None}))
    return directory


def findings(package: Path, *only: str, probe: ProbeProcess | None = None) -> list[Finding]:
    """Return the findings of checks, by default of all but `load`; without `probe`, a new process imports Torch."""
    names = only or [name for name in CHECKS if name != "load"]
    (report,) = run_all([package], only=names, probe=probe)
    return list(report.findings)
