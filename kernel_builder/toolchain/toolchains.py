"""The toolchains of one invocation: the user's compilers, and pinned trees that are fetched when first needed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_builder.backends.cuda import CudaToolkit, known_capabilities
from kernel_builder.backends.cuda_commands import include_directories
from kernel_builder.config.variant import Release, this_platform
from kernel_builder.progress import Progress, Silent
from kernel_builder.toolchain import cuda_choice, host_compiler, lock, sysroot, system_cuda, trees
from kernel_builder.toolchain import dependencies as header_libraries
from kernel_builder.toolchain.lock import ClangPin
from kernel_builder.toolchain.probe_cache import ProbeCache
from kernel_builder.toolchain.store import Store
from kernel_builder.toolchain.tools import (
    Clang,
    ComponentFiles,
    CudaCompiler,
    HeaderLibrary,
    HostCompiler,
    Obstacle,
    Subset,
    TorchHeaders,
)
from kernel_format.cache_directory import default_cache
from kernel_format.errors import FetchError, ToolchainError

if TYPE_CHECKING:
    from kernel_builder.toolchain.index import Index


_UPDATE = "update kernel-builder, or use the lock that comes with it"


def _given() -> Mapping[str, Path]:
    named = os.environ.get("KERNEL_BUILDER_TREES")
    return {path.name: path.resolve() for path in Path(named).iterdir()} if named else {}


class Toolchains:
    """The toolchains of one invocation.

    Args:
        cache: The cache directory, which holds the store.
        cuda_home: An installed CUDA toolkit, used in place of the pinned one of its release. Defaults to CUDA_HOME.
        cxx: The host compiler. Defaults to CXX, or else g++.
        cross_cxx: The compiler for the other platform. Defaults to GNU's name, such as aarch64-linux-gnu-g++.
        offline: Whether to fail instead of using the network.
        progress: Receives reports of downloads.
        index_url: The package index. Defaults to the one that pip or uv is set to use, or else PyPI.
        pinned: The lock. Defaults to the one that comes with the builder.
        given: Kind of a pinned tree, such as `cuda-13.0` -> its directory, for a caller with its own store such as
            Nix. Defaults to the entries of the directory KERNEL_BUILDER_TREES.
        cuda_compiler: The compiler of all CUDA variants. By default nvcc, and clang for a CUDA release that it can
            compile for and of which there is no nvcc.
        dependencies: Header library, such as `cutlass_3_9` -> a directory to use instead of the pinned one, in addition
            to those that KERNEL_BUILDER_DEPENDENCIES names.
    """

    def __init__(
        self,
        *,
        cache: Path | None = None,
        cuda_home: Path | None = None,
        cxx: str | None = None,
        cross_cxx: str | None = None,
        offline: bool = False,
        progress: Progress | None = None,
        index_url: str | None = None,
        pinned: lock.Lock | None = None,
        given: Mapping[str, Path] | None = None,
        cuda_compiler: CudaCompiler | None = None,
        dependencies: Mapping[str, Path] | None = None,
    ) -> None:
        self.cache = cache or default_cache()
        self._progress = progress or Silent()
        # Symbolic links are resolved: two names of one compiler are one compiler.
        self.store = Store((self.cache / "toolchains").resolve(), self._progress)
        self._probes = ProbeCache(self.store.root / "probes")
        self._cuda_home, self._cxx, self._cross_cxx = cuda_home, cxx, cross_cxx
        self._offline, self._index_url = offline, index_url
        self._pinned = pinned
        self._cuda_compiler = cuda_compiler
        self._given = _given() if given is None else given
        self.given_dependencies = {**header_libraries.given_by_environment(), **(dependencies or {})}
        self._in_directories: dict[str, HeaderLibrary] = {}
        self._hosts: dict[str, HostCompiler] = {}

    @cached_property
    def lock(self) -> lock.Lock:
        """The pinned wheels."""
        return self._pinned or lock.shipped()

    @cached_property
    def _index(self) -> Index:
        from kernel_builder.toolchain.index import Index

        return Index(self._index_url)

    def host(self, platform: str | None = None) -> HostCompiler:
        """Return the user's g++ for a platform, by default this machine's.

        Raises:
            ToolchainError: If there is none, or it cannot be used.
        """
        target = platform or this_platform()
        if target not in self._hosts:  # every variant asks for it
            named = self._cxx if target == this_platform() else self._cross_cxx
            self._hosts[target] = host_compiler.find(self._probes, target, named)
        return self._hosts[target]

    def host_obstacle(self, platform: str) -> Obstacle | None:
        """Return why another platform's host code cannot be compiled on this machine, or None if it can. No network."""
        if platform == this_platform():
            return None  # an error of the build, not a reason to leave variants out
        try:
            self.host(platform)
        except ToolchainError as error:
            return Obstacle(f"this machine has no compiler for {platform}: {error}", error.hint or "")
        return None

    def system_cuda(self) -> CudaToolkit | None:
        """Return the toolkit that the user named, if any.

        Raises:
            ToolchainError: If the named directory is not a toolkit.
        """
        toolkit = system_cuda.find(self._probes, self._cuda_home)
        # In a devshell, CUDA_HOME names a pinned toolkit. `cuda` returns it with the identity that the lock gives it.
        return None if toolkit and toolkit.root.is_relative_to(self.store.root) else toolkit

    def cuda(self, release: Release) -> CudaToolkit:
        """Return what compiles for a CUDA release: the user's nvcc if it is of this release, the pinned one, or clang.

        Raises:
            ToolchainError: If there is none. `cuda_obstacle` finds this out without fetching anything.
            FetchError: If it cannot be fetched.
            StoreError: If it cannot be stored.
        """
        if obstacle := self.cuda_obstacle(release):
            raise ToolchainError(obstacle.reason, where=f"CUDA {release}", hint=obstacle.hint)
        if pinned := self._clang_for(release):
            return self._clang_toolkit(pinned)
        toolkit = self.system_cuda()
        if toolkit and toolkit.release == release:
            return toolkit
        tree = trees.cuda_tree(self.lock.cuda[release], this_platform())
        root = self.fetch(tree)
        nvcc = root / "bin/nvcc"
        version, capabilities = system_cuda.probe(self._probes, nvcc)
        return CudaToolkit(
            root=root,
            release=release,
            version=version,
            nvcc=nvcc,
            include=include_directories(root),
            lib=root / "lib",
            identity=tree.identity,
            origin="index",
            capabilities=capabilities,
        )

    def _clang_for(self, release: Release) -> ClangPin | None:
        """Return clang if it is what compiles for a CUDA release."""
        return cuda_choice.clang_for(self.lock, self.system_cuda(), release, this_platform(), self._cuda_compiler)

    def clang(self) -> Clang:
        """Return the pinned clang, which compiles for all platforms.

        Raises:
            ToolchainError: If it is not pinned for this platform.
            FetchError: If it cannot be fetched.
            StoreError: If it cannot be stored.
        """
        pinned = self.lock.clang
        if pinned is None or this_platform() not in pinned.platforms:
            raise ToolchainError(f"it is not pinned for {this_platform()}", where="clang", hint=_UPDATE)
        tree = trees.clang_tree(pinned, this_platform())
        return Clang(self.fetch(tree), pinned.version, tree.identity)

    def component(self, name: str) -> ComponentFiles:
        """Return a component of a back end's toolchain, which its table names.

        Raises:
            ToolchainError: If it is not pinned. `component_obstacle` finds this out without fetching anything.
            FetchError: If it cannot be fetched.
            StoreError: If it cannot be stored.
        """
        if name not in self.lock.components:
            raise ToolchainError("the lock does not have it", where=name, hint=_UPDATE)
        pinned = self.lock.components[name]
        tree = trees.component_tree(pinned)
        return ComponentFiles(self.fetch(tree), pinned.version, tree.identity)

    def component_obstacle(self, name: str) -> Obstacle | None:
        """Return why a component cannot be had, or None if it can. No network."""
        return (
            None if name in self.lock.components else Obstacle(f"needs {name}, which the lock does not have", _UPDATE)
        )

    def clang_obstacle(self) -> Obstacle | None:
        """Return why clang cannot be had on this machine, or None if it can. No network."""
        if self.lock.clang is None or this_platform() not in self.lock.clang.platforms:
            return Obstacle(f"needs clang, which is not pinned for {this_platform()}", _UPDATE)
        return None

    def made(self, name: str, title: str, make: Callable[[Path], None]) -> Path:
        """Return a directory of the store that is made from others, once.

        Args:
            name: Names it by what determines its content.
            make: Fills the empty directory that it is given.

        Raises:
            StoreError: If it cannot be stored.
        """
        return self.store.obtain(name, title, 0, lambda _, directory: make(directory))

    def _clang_toolkit(self, pinned: ClangPin) -> CudaToolkit:
        clang = self.clang()
        tree = trees.cuda_tree(pinned.cuda, this_platform())
        root = self.fetch(tree)
        return CudaToolkit(
            root=root,
            release=pinned.cuda.release,
            version=pinned.cuda.version,
            nvcc=None,
            include=include_directories(root),
            lib=root / "lib",
            identity=hashlib.sha256(f"{clang.identity} {tree.identity}".encode()).hexdigest(),
            origin="index",
            capabilities=known_capabilities()[pinned.cuda.release],
            clang=clang,
        )

    def torch(self, release: Release, subset: Subset, platform: str | None = None) -> TorchHeaders:
        """Return the headers of a Torch release for a platform, by default this machine's.

        The stable ABI of a release before the first pinned one is targeted with the headers of the first: with
        TORCH_TARGET_VERSION they hide what later releases have added.

        Raises:
            ToolchainError: If they are not pinned for the platform.
            FetchError: If they cannot be fetched.
            StoreError: If they cannot be stored.
        """
        if subset == "stable" and self.lock.torch:
            release = max(release, min(self.lock.torch))
        pinned = self.lock.torch.get(release)
        target = platform or this_platform()
        if pinned is None or target not in pinned.platforms:
            raise ToolchainError(
                f"its headers are not pinned for {target}; the lock has Torch {', '.join(map(str, self.lock.torch))}",
                where=f"Torch {release}",
                hint="update kernel-builder, or add it with `kernel-builder toolchain update`",
            )
        tree = trees.torch_tree(pinned, target, subset)
        root = self.fetch(tree)
        include = (root,) if subset == "stable" else (root, root / "torch/csrc/api/include")
        return TorchHeaders(release, pinned.version, subset, include, tree.identity)

    def cuda_libraries(self, toolkit: CudaToolkit) -> HeaderLibrary | None:
        """Return the headers of CUDA's libraries that belong to a pinned toolkit; None for the user's, which has them.

        Raises:
            FetchError: If they cannot be fetched.
            StoreError: If they cannot be stored.
        """
        if toolkit.origin == "system":
            return None
        of_clang = self.lock.clang.cuda if toolkit.clang and self.lock.clang else None
        tree = trees.libraries_tree(of_clang or self.lock.cuda[toolkit.release], this_platform())
        root = self.fetch(tree)
        return HeaderLibrary(tree.kind, root, (root / "include",), tree.identity)

    def dependency(self, name: str) -> HeaderLibrary:
        """Return a header library: from the directory that the user gave for it, or else the pinned one.

        Raises:
            ToolchainError: If there is none, or the given directory does not have it. `dependency_obstacle` finds this
                out without fetching anything.
            FetchError: If it cannot be fetched.
            StoreError: If it cannot be stored.
        """
        if given := self.given_dependencies.get(name):
            if name not in self._in_directories:  # its headers are hashed once, not for every variant
                self._in_directories[name] = header_libraries.in_directory(name, given)
            return self._in_directories[name]
        if obstacle := self.dependency_obstacle(name):
            raise ToolchainError(obstacle.reason, where=name, hint=obstacle.hint)
        tree = trees.dependency_tree(self.lock.dependencies[name])
        root = self.fetch(tree)
        return HeaderLibrary(name, root, header_libraries.include_directories(root), tree.identity)

    def dependency_obstacle(self, name: str) -> Obstacle | None:
        """Return why a header library cannot be had, or None if it can. No network.

        Raises:
            ToolchainError: If the directory that the user gave does not have it.
        """
        if given := self.given_dependencies.get(name):
            header_libraries.check_directory(name, given)
            return None
        if name in self.lock.dependencies:
            return None
        if library := header_libraries.known().get(name):
            return Obstacle(
                f"needs {name}, which no package index has",
                f"`git clone --depth 1 --branch v{library.version} https://github.com/NVIDIA/cutlass DIR`, and set "
                f"KERNEL_BUILDER_DEPENDENCIES={name}=DIR; or depend on one that the index has: "
                f"{', '.join(self.lock.dependencies)}",
            )
        return Obstacle(
            f"needs {name}, which this builder does not have",
            "copy the headers into the project, and name their directory in `include`",
        )

    def sysroot(self, platform: str | None = None, libraries: Sequence[str] = ()) -> sysroot.Sysroot:
        """Return the libraries to link against for a platform, made once for each host compiler.

        Args:
            libraries: What it must have empty stand-ins of, besides those of every sysroot.

        Raises:
            ToolchainError: If there is no usable host compiler, or a runtime library is missing.
        """
        compiler = self.host(platform)
        more = sorted({*libraries} - {*sysroot.UNVERSIONED_LIBRARIES})

        def make(_: Path, directory: Path) -> None:
            from kernel_builder.toolchain import stand_ins  # made once for each host compiler

            stand_ins.make(compiler, directory, more)

        of_more = f"-{hashlib.sha256(repr(more).encode()).hexdigest()[:16]}" if more else ""
        root = self.store.obtain(
            f"sysroot-{sysroot.RECIPE}-{compiler.identity[:16]}{of_more}",
            f"stand-in libraries of g++ {compiler.version} for {compiler.platform}",
            0,
            make,
        )
        return sysroot.Sysroot(root, compiler.platform)

    def cuda_obstacle(self, release: Release) -> Obstacle | None:
        """Return why a CUDA release cannot be had on this machine, or None if it can. No network.

        Its compiler serves all platforms: only the host compiler that it runs is another one.

        Raises:
            ToolchainError: If the directory that the user named is not a toolkit.
        """
        return cuda_choice.obstacle(self.lock, self.system_cuda(), release, self._cuda_compiler)

    def static_cuda_obstacle(self, release: Release) -> Obstacle | None:
        """Return why the static runtime of a CUDA release cannot be had, or None if it can. No network.

        Raises:
            ToolchainError: If the directory that the user named is not a toolkit.
        """
        if self._clang_for(release) is None:
            return None
        return Obstacle(
            f"needs the static runtime of CUDA {release}, since it does not link Torch, and no package index has it",
            f"install the CUDA toolkit {release} and name its directory, e.g. `--cuda-home /usr/local/cuda-{release}`",
        )

    def cuda_kinds(self, release: Release) -> list[str]:
        """Return the kinds of the pinned trees that variants of a CUDA release are compiled with."""
        clang = self._clang_for(release)
        used = clang.cuda.release if clang else release
        kinds = [f"cuda-{used}", f"cuda-libraries-{used}"]
        return [trees.clang_tree(clang, this_platform()).kind, *kinds] if clang else kinds

    def pinned(self, platform: str | None = None) -> list[trees.Tree]:
        """Return every tree of the lock for builds on this machine, by default for its own platform.

        Of another platform these are its Torch headers; the compilers are those that run here.
        """
        here, target = this_platform(), platform or this_platform()
        clang = self.lock.clang if self.lock.clang and here in self.lock.clang.platforms else None
        cudas = [cuda for cuda in self.lock.cuda.values() if here in cuda.platforms]
        wanted = [trees.cuda_tree(cuda, here) for cuda in cudas]
        if clang:
            wanted += [trees.clang_tree(clang, here), trees.cuda_tree(clang.cuda, here)]
            cudas.append(clang.cuda)
        wanted += [trees.libraries_tree(cuda, here) for cuda in cudas]
        subsets: tuple[Subset, ...] = ("stable", "full")
        wanted += [
            trees.torch_tree(torch, target, subset)
            for torch in self.lock.torch.values()
            if target in torch.platforms
            for subset in subsets
        ]
        wanted += [trees.dependency_tree(pin) for pin in self.lock.dependencies.values()]
        wanted += [trees.component_tree(pin) for pin in self.lock.components.values()]
        return wanted

    def fetch(self, tree: trees.Tree) -> Path:
        """Return the directory of a pinned tree's files, and download them first if they are not in the store.

        Raises:
            FetchError: If they cannot be fetched.
            StoreError: If they cannot be stored.
        """
        is_foreign = tree.platform not in ("any", this_platform())
        given = None if is_foreign else self._given.get(tree.kind)
        if root := given or self.store.find(tree.name):
            return root
        if self._offline:
            crossed = f" --platform {tree.platform}" if is_foreign else ""
            raise FetchError(
                f"is not in the store at {self.store.root}, and `--offline` forbids the network",
                where=tree.title,
                hint=f"run `kernel-builder toolchain fetch{crossed}` beforehand, or leave out `--offline`",
            )

        def make(scratch: Path, directory: Path) -> None:
            from kernel_builder.toolchain import tree_files  # most builds find all trees in the store

            tree_files.fill(tree, self._index, scratch, directory, self._progress)

        return self.store.obtain(tree.name, tree.title, tree.download + tree.unpacked, make)
