"""A kernel project as a value, with its back ends: the content of its `build.toml`, and its Python files.

A project does not depend on the toolchains, which decide later whether there is the CUDA release that it names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from kernel_format import variant
from kernel_format.release import Release, Version

_PYEXT = ("py", "pyi")
# The endings of files of `src` that are not compiled.
HEADER_SUFFIXES = frozenset({".cuh", ".h", ".hh", ".hpp", ".hxx", ".inc", ".inl"})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Backend(variant.Backend):
    """A back end as `build.toml` and the matrix know it.

    An instance of this class itself is a back end that the builder recognizes and does not compile for. The others are
    instances of `backends.CompiledBackend`.

    Attributes:
        suffixes: Endings of sources that its own compiler compiles, besides those of C++.
        archs_key: The field of kernels and Python-only projects with its architectures; empty if it has none.
        dispatch_key: With which Torch dispatches to its ops, such as `CUDA`; empty if the checks know of none.
        in_every_torch: Whether each build of Torch has it. Where Torch has another one too, the client loads packages
            for it on request only.
        torch_version: The name in `torch.version` whose value is None in builds of Torch without it; empty for none.
        preference: Of the variants that a machine can load, which to develop and test: those of the highest.
        platforms: The platforms that it is on, as names of variants write them; empty for all.
        why_not: Why the builder does not compile for it.
    """

    compiles: ClassVar[bool] = False

    suffixes: frozenset[str] = frozenset()
    archs_key: str = ""
    dispatch_key: str = ""
    in_every_torch: bool = False
    torch_version: str = ""
    preference: int = 0
    platforms: tuple[str, ...] = ()
    why_not: str = ""

    def why_not_compiled(self, project: Project) -> str:
        """Return why the builder does not compile a project for it, or nothing if it does."""
        return self.why_not

    def torch_index(self, release: Release | None) -> str:
        """Return the directory of Torch's builds for a release in PyTorch's own package index."""
        return self.spelled(release)

    def published(self) -> Mapping[Release, Sequence[Release | None]]:
        """Return Torch release -> the releases of the back end that it is published for; None for one without."""
        return {}

    def releases(self) -> Sequence[Release | None]:
        """Return every release of the back end that it can be compiled for, ascending."""
        return ()

    def allowed(self, project: Project, releases: Sequence[Release | None]) -> Sequence[Release | None]:
        """Return the releases that the project's own settings allow."""
        return releases

    def representative(self, releases: Sequence[Release | None]) -> Sequence[Release | None]:
        """Return the releases whose binaries on the stable ABI serve all of these, by default each of them."""
        return releases

    def can_load(self, built: Release | None, release: Release | None) -> bool:
        """Return whether a Torch for a release loads a binary for another one; None is a package for any."""
        return built is None or built == release

    def runs_with(self, release: Release) -> str:
        """Return the releases that a client may have to load a binary for this one, for tables."""
        return str(release)

    def serves(self, kernel: Kernel, release: Release | None) -> bool:
        """Return whether a kernel is for a release."""
        return True

    def notes(self, kernel: Kernel) -> Iterator[str]:
        """Yield notices for the author of a `[kernel.<name>]` table."""
        listed, known = getattr(kernel, self.archs_key, None) or (), self.known_archs()
        if unknown := [arch for arch in listed if arch_number(arch) not in known]:
            yield (
                f"[kernel.{kernel.name}] {self.archs_key.replace('_', '-')}: no known {self.title} compiles for "
                f"{', '.join(unknown)}; {'it is' if len(unknown) == 1 else 'they are'} skipped"
            )

    def limited(self, kernel: Kernel, only: tuple[str, ...]) -> Kernel:
        """Return a kernel that is compiled for some architectures only, or as it is if it has no others.

        Args:
            only: Architectures of any back end.
        """
        return replace(kernel, only_capabilities=tuple(arch for arch in only if arch in self.known_archs()))

    def known_archs(self) -> Sequence[str]:
        """Return the architectures that a build can be limited to, ascending."""
        return ()

    def current_archs(self) -> tuple[str, ...]:
        """Return the architecture of the device that Torch uses, to compile for it alone; empty to compile for all."""
        return ()

    def is_present(self) -> bool:
        """Return whether this machine has the hardware, as far as the builder can tell."""
        return self.compiles


@dataclass(frozen=True)
class Kernel:
    """One `[kernel.<name>]` table: sources that one backend's compiler compiles with one set of flags.

    Attributes:
        src: Sources and headers, relative to the project.
        include: Include directories, relative to the project.
        cuda_capabilities: The capabilities to compile for, such as `9.0a`; None for all that the compiler knows.
        cargo_manifest: The `Cargo.toml` of a crate, relative to the project; None for sources of C++ compilers.
        only_capabilities: Compile for these of them only, such as `9.0`; empty for all. Not a key of `build.toml`.
    """

    name: str
    backend: Backend
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
    cargo_manifest: str | None = None
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
    stable_abi: Mapping[Backend, Release] = field(default_factory=dict)


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
    stable_abi: ClassVar[Mapping[Backend, Release]] = {}

    src: tuple[str, ...] = ()
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
        warnings: Notices about accepted values of `build.toml`.
        ahead_of_time: The compiled project that offers the binary variants of a Python-only one; see `aot_toml`.
    """

    root: Path
    name: str
    version: int
    license: str
    backends: tuple[Backend, ...]
    framework: Framework
    kernels: tuple[Kernel, ...]
    python_files: tuple[tuple[str, Path], ...] = ()
    upstream: tuple[str, ...] = ()
    source: str | None = None
    python_depends: tuple[str, ...] = ()
    backend_python_depends: Mapping[Backend, tuple[str, ...]] = field(default_factory=dict)
    kernel_depends: tuple[KernelDependency, ...] = ()
    backend_kernel_depends: Mapping[Backend, tuple[KernelDependency, ...]] = field(default_factory=dict)
    backend_settings: Mapping[Backend, Mapping[str, Any]] = field(default_factory=dict)
    hub_repo_id: str | None = None
    hub_branch: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    ahead_of_time: Project | None = None

    @property
    def python_name(self) -> str:
        """The name of the Python package."""
        return python_name(self.name)


def arch_number(arch: str) -> str:
    """Return a capability without its suffixes: `9.0` for `9.0a+PTX`. Architectures of other back ends have none."""
    return re.sub(r"^(\d+\.\d+)[af]?(\+PTX)?$", r"\1", arch)


def python_name(name: str) -> str:
    """Return the name of a kernel's Python package: `flash_attn` for `flash-attn`."""
    return name.replace("-", "_")


def distribution_name(dependency: str) -> str:
    """Return the package index's name of an entry of `python-depends`."""
    return {"tvm-ffi": "apache-tvm-ffi", "onednn": "onednn-devel"}.get(dependency, dependency)
