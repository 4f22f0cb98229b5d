"""A CUDA toolkit of the user's."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from kernel_builder.config.variant import Release
from kernel_builder.errors import ToolchainError
from kernel_builder.toolchain.probe_cache import ProbeCache
from kernel_builder.toolchain.tools import CudaToolkit

# What nvcc runs, and what it reads at each compilation.
_PROGRAMS = ("bin/nvcc", "bin/cudafe++", "bin/ptxas", "bin/fatbinary", "bin/nvlink", "nvvm/bin/cicc")
_READ = ("bin/nvcc.profile", "nvvm/libdevice", "include")

_HINT = "give the directory that holds bin/nvcc, by `--cuda-home` or CUDA_HOME, or unset CUDA_HOME to use pinned wheels"


def find(probes: ProbeCache, cuda_home: Path | None = None) -> CudaToolkit | None:
    """The toolkit at `cuda_home`, else at CUDA_HOME; None where neither is given.

    Raises:
        ToolchainError: If there is no complete toolkit.
    """
    named = cuda_home or (Path(value) if (value := os.environ.get("CUDA_HOME")) else None)
    if named is None:
        return None
    root = named.absolute()
    missing = [part for part in (*_PROGRAMS, "include") if not (root / part).exists()]
    if missing:
        raise ToolchainError(f"is not a CUDA toolkit: it has no {', '.join(missing)}", where=str(root), hint=_HINT)
    version, capabilities = ask(probes, root / "bin/nvcc")
    parts = [root / part for part in (*_PROGRAMS, *_READ) if (root / part).exists()]
    return CudaToolkit(
        root=root,
        release=Release.parse(version),
        version=version,
        nvcc=root / "bin/nvcc",
        include=include_directories(root),
        lib=next((root / name for name in ("lib64", "lib") if (root / name).is_dir()), root / "lib64"),
        identity=probes.recall("cuda identity", parts, lambda: _identify(root, parts)),
        origin="system",
        capabilities=capabilities,
    )


def include_directories(root: Path) -> tuple[Path, ...]:
    """Where a toolkit keeps its headers; CUDA 13 has the C++ library in a directory of its own."""
    return tuple(path for path in (root / "include", root / "include/cccl") if path.is_dir())


def ask(probes: ProbeCache, nvcc: Path) -> tuple[str, tuple[str, ...]]:
    """What an nvcc says of itself: its version, and the capabilities that it compiles for, ascending.

    Raises:
        ToolchainError: If it cannot be run, or is not an nvcc.
    """

    def find_out() -> dict[str, Any]:
        version = re.search(r"\bV(\d+\.\d+\.\d+)", _run(nvcc, "--version"))
        if not version:
            raise ToolchainError("does not tell its version", where=str(nvcc), hint=_HINT)
        codes = re.findall(r"^sm_(\d+)(\d)$", _run(nvcc, "--list-gpu-code"), re.MULTILINE)
        ascending = sorted({(int(major), int(minor)) for major, minor in codes})
        return {"version": version[1], "capabilities": [f"{major}.{minor}" for major, minor in ascending]}

    about = probes.recall("nvcc", [nvcc], find_out)
    return about["version"], tuple(about["capabilities"])


def _identify(root: Path, parts: list[Path]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for path in sorted(part.rglob("*")) if part.is_dir() else [part]:
            if path.is_file():
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def _run(nvcc: Path, argument: str) -> str:
    try:
        done = subprocess.run([nvcc, argument], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"cannot be run: {error}", where=str(nvcc), hint=_HINT) from error
    return done.stdout
