"""The compiler of a CUDA release: the nvcc of a toolkit that the user names, a pinned nvcc, or the pinned clang.

Without a choice of the user, nvcc goes first where there is one. clang compiles with the headers of one CUDA release
for all minor releases of that major, and on request for later majors: its binaries use only functions that the runtimes
of all of them have.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kernel_builder.backends import CLANG
from kernel_builder.backends.cuda.releases import DATA, KNOWN_CAPABILITIES
from kernel_builder.backends.tools import (
    ComponentFiles,
    CudaCompiler,
    HeaderLibrary,
    Obstacle,
    ToolchainSource,
    Toolkit,
)
from kernel_builder.plural import listed
from kernel_builder.probe_cache import output_of
from kernel_format.errors import ToolchainError
from kernel_format.files import digest_files
from kernel_format.release import Release

# The programs that nvcc runs, and the files that it reads in each compilation.
_PROGRAMS = ("bin/nvcc", "bin/cudafe++", "bin/ptxas", "bin/fatbinary", "bin/nvlink", "nvvm/bin/cicc")
_READ = ("bin/nvcc.profile", "nvvm/libdevice", "include")

_INSTALL = "install the CUDA toolkit {0} and name its directory, e.g. `--cuda-home /usr/local/cuda-{0}`"
_HINT = "name the directory with bin/nvcc, with `--cuda-home` or CUDA_HOME; or unset CUDA_HOME to use pinned wheels"


@dataclass(frozen=True, kw_only=True)
class CudaToolkit(Toolkit):
    """A CUDA compiler with its headers and libraries."""

    name: str = "cuda"  # the name in commands
    release: Release  # for example 13.0. clang compiles with a newer one than that of the variants that it makes
    version: str  # the version of nvcc, for example `13.0.88`, or of the pinned toolkit
    nvcc: Path | None  # none if clang compiles
    lib: Path  # the directory of the CUDA runtime libraries. Wheels for clang have none
    origin: Literal["index", "system"]  # `index` for pinned wheels, `system` for an installed toolkit
    clang: ComponentFiles | None = None  # the compiler of a toolkit without nvcc


def as_cuda(toolkit: Toolkit | None) -> CudaToolkit:
    """Return a toolkit that this back end has returned."""
    assert isinstance(toolkit, CudaToolkit)
    return toolkit


def toolkit(toolchains: ToolchainSource, release: Release) -> CudaToolkit:
    """Return the toolkit that compiles for a CUDA release."""
    if unusable := obstacle(toolchains, release):
        raise ToolchainError(unusable.reason, where=f"CUDA {release}", hint=unusable.hint)
    compiler = _choose(toolchains, release)
    if isinstance(compiler, CudaToolkit):
        return compiler
    clang = toolchains.component(CLANG) if compiler == "clang" else None
    used = _clang_release() if clang else release
    files = toolchains.component(f"cuda-{used}")
    identity = files.identity
    if clang:
        identity = hashlib.sha256(f"{clang.identity} {identity}".encode()).hexdigest()
    return CudaToolkit(
        root=files.root,
        release=used,
        version=files.version,
        nvcc=None if clang else files.root / "bin/nvcc",
        include=include_directories(files.root),
        lib=files.root / "lib",
        identity=identity,
        origin="index",
        clang=clang,
    )


def _choose(toolchains: ToolchainSource, release: Release) -> CudaToolkit | CudaCompiler | None:
    """Return the compiler for a release: an installed toolkit, a pinned `nvcc`, or `clang`; None if nothing does."""
    choice, major = toolchains.cuda_compiler, _clang_release().major
    if choice != "clang":
        system = installed(toolchains)
        if system and system.release == release:
            return system
        if _has_pinned_nvcc(toolchains, release):
            return "nvcc"
    is_fit = release.major >= major if choice == "clang" else release.major == major and choice is None
    return "clang" if is_fit and _has_clang(toolchains) else None


def include_directories(root: Path) -> tuple[Path, ...]:
    """Return the include directories of a toolkit. CUDA 13 has CCCL in a directory of its own."""
    return tuple(path for path in (root / "include", root / "include/cccl") if path.is_dir())


def library_headers(toolchains: ToolchainSource, toolkit: CudaToolkit) -> HeaderLibrary | None:
    """Return the headers of CUDA's libraries for a pinned toolkit; None for an installed one, which has them."""
    if toolkit.origin == "system":
        return None
    name = f"cuda-libraries-{toolkit.release}"
    files = toolchains.component(name)
    return HeaderLibrary(name, files.root, (files.root / "include",), files.identity)


def obstacle(toolchains: ToolchainSource, release: Release, *, with_torch: bool = True) -> Obstacle | None:
    """Return why this machine cannot compile for a CUDA release, or None if it can. No network."""
    compiler = _choose(toolchains, release)
    if compiler == "clang" and not with_torch:
        return Obstacle(
            f"needs the static runtime of CUDA {release}, since it does not link Torch, and no package index has it",
            _INSTALL.format(release),
        )
    if compiler:
        return None
    system, choice = installed(toolchains), toolchains.cuda_compiler
    with_compiler = [known for known in KNOWN_CAPABILITIES if _has_pinned_nvcc(toolchains, known)]
    if _has_clang(toolchains) and choice is None:
        with_compiler.append(_clang_release())
    has = f", and {system.root} is CUDA {system.release}" if system else ""
    hint = f"leave out `--cuda-compiler {choice}`, or " if choice else ""
    return Obstacle(
        f"needs CUDA {release}; this builder has {listed(sorted(with_compiler)) if with_compiler else 'none'}{has}",
        f"{hint}{_INSTALL.format(release)}",
    )


def _clang_release() -> Release:
    """Return the CUDA release whose headers clang compiles with. Its component has no nvcc."""
    return Release.parse(DATA["clang"]["cuda"])


def _has_clang(toolchains: ToolchainSource) -> bool:
    return not any(map(toolchains.component_obstacle, (CLANG, f"cuda-{_clang_release()}")))


def _has_pinned_nvcc(toolchains: ToolchainSource, release: Release) -> bool:
    return release != _clang_release() and toolchains.component_obstacle(f"cuda-{release}") is None


def installed(toolchains: ToolchainSource) -> CudaToolkit | None:
    """Return the toolkit that `--cuda-home` or CUDA_HOME names, or None if neither is given.

    In a devshell, CUDA_HOME names a pinned toolkit: `toolkit` returns that with the identity of the lock.
    """
    named = toolchains.cuda_home or (Path(value) if (value := os.environ.get("CUDA_HOME")) else None)
    if named is None or named.absolute().is_relative_to(toolchains.store_root):
        return None
    root = named.absolute()
    missing = [part for part in (*_PROGRAMS, "include") if not (root / part).exists()]
    if missing:
        raise ToolchainError(f"is not a CUDA toolkit: it has no {', '.join(missing)}", where=str(root), hint=_HINT)
    version = toolchains.probes.recall("nvcc version", [root / "bin/nvcc"], lambda: _version_of(root / "bin/nvcc"))
    parts = [root / part for part in (*_PROGRAMS, *_READ) if (root / part).exists()]
    return CudaToolkit(
        root=root,
        release=Release.parse(version),
        version=version,
        nvcc=root / "bin/nvcc",
        include=include_directories(root),
        lib=next((root / name for name in ("lib64", "lib") if (root / name).is_dir()), root / "lib64"),
        identity=toolchains.probes.recall("cuda identity", parts, lambda: digest_files(root, parts)),
        origin="system",
    )


def _version_of(nvcc: Path) -> str:
    version = re.search(r"\bV(\d+\.\d+\.\d+)", output_of(nvcc, "--version", hint=_HINT))
    if not version:
        raise ToolchainError("`--version` names no version", where=str(nvcc), hint=_HINT)
    return version[1]
