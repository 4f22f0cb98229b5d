"""Finds an installed CUDA toolkit that the user names, and identifies it by its content."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from kernel_builder.backends.cuda import CudaToolkit
from kernel_builder.backends.cuda_commands import include_directories
from kernel_builder.config.variant import Release
from kernel_builder.toolchain.probe_cache import ProbeCache, output_of
from kernel_format.errors import ToolchainError
from kernel_format.files import digest_files

# The programs that nvcc runs, and the files that it reads in each compilation.
_PROGRAMS = ("bin/nvcc", "bin/cudafe++", "bin/ptxas", "bin/fatbinary", "bin/nvlink", "nvvm/bin/cicc")
_READ = ("bin/nvcc.profile", "nvvm/libdevice", "include")

_HINT = "name the directory with bin/nvcc, with `--cuda-home` or CUDA_HOME; or unset CUDA_HOME to use pinned wheels"


def find(probes: ProbeCache, cuda_home: Path | None = None) -> CudaToolkit | None:
    """Return the toolkit at `cuda_home`, or else at CUDA_HOME, or None if neither is given.

    Raises:
        ToolchainError: If the directory has no complete toolkit.
    """
    named = cuda_home or (Path(value) if (value := os.environ.get("CUDA_HOME")) else None)
    if named is None:
        return None
    root = named.absolute()
    missing = [part for part in (*_PROGRAMS, "include") if not (root / part).exists()]
    if missing:
        raise ToolchainError(f"is not a CUDA toolkit: it has no {', '.join(missing)}", where=str(root), hint=_HINT)
    version, capabilities = probe(probes, root / "bin/nvcc")
    parts = [root / part for part in (*_PROGRAMS, *_READ) if (root / part).exists()]
    return CudaToolkit(
        root=root,
        release=Release.parse(version),
        version=version,
        nvcc=root / "bin/nvcc",
        include=include_directories(root),
        lib=next((root / name for name in ("lib64", "lib") if (root / name).is_dir()), root / "lib64"),
        identity=probes.recall("cuda identity", parts, lambda: digest_files(root, parts)),
        origin="system",
        capabilities=capabilities,
    )


def probe(probes: ProbeCache, nvcc: Path) -> tuple[str, tuple[str, ...]]:
    """Return the version of an nvcc, and the capabilities that it compiles for, ascending.

    Raises:
        ToolchainError: If the program cannot be run or is not an nvcc.
    """

    def find_out() -> dict[str, Any]:
        version = re.search(r"\bV(\d+\.\d+\.\d+)", output_of(nvcc, "--version", hint=_HINT))
        if not version:
            raise ToolchainError("`--version` names no version", where=str(nvcc), hint=_HINT)
        codes = re.findall(r"^sm_(\d+)(\d)$", output_of(nvcc, "--list-gpu-code", hint=_HINT), re.MULTILINE)
        ascending = sorted({(int(major), int(minor)) for major, minor in codes})
        return {"version": version[1], "capabilities": [f"{major}.{minor}" for major, minor in ascending]}

    about = probes.recall("nvcc", [nvcc], find_out)
    return about["version"], tuple(about["capabilities"])
