"""A kernel project as a value: what its `build.toml` says, and its Python files.

A project does not depend on what can be built: whether a toolchain has the CUDA release it asks for is decided later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kernel_format.release import Release, Version

_PYEXT = ("py", "pyi")
# The endings of files of `src` that are not compiled.
HEADER_SUFFIXES = frozenset({".cuh", ".h", ".hh", ".hpp", ".hxx", ".inc", ".inl"})


@dataclass(frozen=True)
class Kernel:
    """One `[kernel.<name>]` table: sources that one backend's compiler compiles with one set of flags.

    Attributes:
        src: Sources and headers, relative to the project.
        include: Include directories, relative to the project.
        cuda_capabilities: The capabilities to compile for, such as `9.0a`; None for all that the compiler knows.
        settings: The values of keys that a registered back end has added to the format.
        only_capabilities: Compile for these of them only, such as `9.0`; empty for all. Not a key of `build.toml`.
    """

    name: str
    backend: str
    depends: tuple[str, ...]
    src: tuple[str, ...]
    include: tuple[str, ...] = ()
    cxx_flags: tuple[str, ...] = ()
    cuda_capabilities: tuple[str, ...] | None = None
    cuda_flags: tuple[str, ...] = ()
    cuda_minver: Version | None = None
    rocm_archs: tuple[str, ...] | None = None
    hip_flags: tuple[str, ...] = ()
    sycl_flags: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    only_capabilities: tuple[str, ...] = ()


@dataclass(frozen=True)
class TorchFramework:
    """`[torch]`: a compiled extension.

    Attributes:
        stable_abi: Backend -> the oldest Torch release to support through Torch's stable ABI. Backends that are not
            in it use the full C++ ABI.
    """

    table: ClassVar = "torch"
    package_directory: ClassVar = "torch-ext"

    src: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    pyext: tuple[str, ...] = _PYEXT
    cxx_flags: tuple[str, ...] = ()
    minver: Version | None = None
    maxver: Version | None = None
    stable_abi: Mapping[str, Release] = field(default_factory=dict)


@dataclass(frozen=True)
class TorchNoarch:
    """`[torch-noarch]`: Python only."""

    table: ClassVar = "torch-noarch"
    package_directory: ClassVar = "torch-ext"

    pyext: tuple[str, ...] = _PYEXT
    cuda_capabilities: tuple[str, ...] | None = None
    rocm_archs: tuple[str, ...] | None = None


@dataclass(frozen=True)
class TvmFfi:
    """`[tvm-ffi]`: a compiled extension that does not link Torch."""

    table: ClassVar = "tvm-ffi"
    package_directory: ClassVar = "tvm-ffi-ext"
    stable_abi: ClassVar[Mapping[str, Release]] = {}

    src: tuple[str, ...]
    include: tuple[str, ...] = ()
    pyext: tuple[str, ...] = _PYEXT
    cxx_flags: tuple[str, ...] = ()


CompiledFramework = TorchFramework | TvmFfi
Framework = CompiledFramework | TorchNoarch


@dataclass(frozen=True)
class KernelDependency:
    """Another kernel on the Hub, at a version (its API major) or at a revision of its repository."""

    repo_id: str
    version: int | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Project:
    """A directory with a `build.toml`, read and validated.

    Attributes:
        root: The directory, without symbolic links.
        version: The major version of the kernel's API.
        python_files: The files of the Python package that `pyext` selects, sorted: (path in the package, file).
        backend_python_depends: Backend -> dependencies in addition to `python_depends`.
        backend_kernel_depends: Backend -> dependencies in addition to `kernel_depends`.
        backend_settings: Backend -> the other values of its table in `[general]`, such as `minver` of CUDA.
        renamed: Repositories that have another name than in `build.toml`, since another owner publishes them: that name
            -> their name; see `ownership`.
        warnings: What is accepted in `build.toml` and still worth a word to its author.
    """

    root: Path
    name: str
    version: int
    license: str
    backends: tuple[str, ...]
    framework: Framework
    kernels: tuple[Kernel, ...]
    python_files: tuple[tuple[str, Path], ...] = ()
    upstream: str | None = None
    source: str | None = None
    python_depends: tuple[str, ...] = ()
    backend_python_depends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kernel_depends: tuple[KernelDependency, ...] = ()
    backend_kernel_depends: Mapping[str, tuple[KernelDependency, ...]] = field(default_factory=dict)
    backend_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hub_repo_id: str | None = None
    hub_branch: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def python_name(self) -> str:
        """The name of the Python package."""
        return python_name(self.name)


def python_name(name: str) -> str:
    """Return the name of a kernel's Python package: `flash_attn` for `flash-attn`."""
    return name.replace("-", "_")


def distribution_name(dependency: str) -> str:
    """Return what the package index calls an entry of `python-depends`."""
    return {"tvm-ffi": "apache-tvm-ffi", "onednn": "onednn-devel"}.get(dependency, dependency)
