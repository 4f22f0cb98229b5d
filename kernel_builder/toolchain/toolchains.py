"""The toolchains of one invocation: the user's compilers, and pinned trees that are fetched when first needed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_builder.backends.tools import ComponentFiles, CudaCompiler, HeaderLibrary, HostCompiler, Obstacle, Subset
from kernel_builder.config import matrix
from kernel_builder.config.variant import Release, this_platform
from kernel_builder.probe_cache import ProbeCache
from kernel_builder.progress import Progress
from kernel_builder.toolchain import archives, host_compiler, lock, stub_libraries
from kernel_builder.toolchain import dependencies as header_libraries
from kernel_builder.toolchain.components import torch_headers
from kernel_builder.toolchain.lock import Lock, Tree
from kernel_builder.toolchain.store import Store
from kernel_format.cache_directory import default_cache
from kernel_format.errors import FetchError, ToolchainError

if TYPE_CHECKING:
    from kernel_builder.toolchain.index import Index

_UPDATE = "update kernel-builder, or use the lock that comes with it"


class Toolchains:
    """The toolchains of one invocation. The environment variable CXX names the host compiler, by default g++.

    Methods raise a ToolchainError for a tool that is not pinned, missing or unusable, a FetchError for files that
    cannot be fetched, and a StoreError for files that cannot be stored. The methods `..._obstacle` use no network.

    Args:
        cache: The cache directory, which holds the store.
        cuda_home: An installed CUDA toolkit, used in place of the pinned one of its release. Defaults to CUDA_HOME.
        offline: Whether to fail instead of using the network.
        progress: Receives reports of downloads.
        index_url: The package index. Defaults to the one that pip or uv is set to use, or else PyPI.
        pinned: The lock. Defaults to the one that comes with the builder.
        given: Kind of a pinned tree, such as `cuda-13.0` -> its directory, for a caller with its own store such as
            Nix. Defaults to the entries of the directory KERNEL_BUILDER_TREES.
        cuda_compiler: The compiler of all CUDA variants. By default nvcc, and clang for a CUDA release that it can
            compile for and of which there is no nvcc.

    Attributes:
        given_dependencies: Header library, such as `cutlass_3_9` -> the user's directory in place of the pinned one.
    """

    def __init__(
        self,
        *,
        cache: Path | None = None,
        cuda_home: Path | None = None,
        offline: bool = False,
        progress: Progress | None = None,
        index_url: str | None = None,
        pinned: Lock | None = None,
        given: Mapping[str, Path] | None = None,
        cuda_compiler: CudaCompiler | None = None,
    ) -> None:
        self.cache = cache or default_cache()
        self._progress = progress or Progress()
        # Symbolic links are resolved: two names of one compiler are one compiler.
        self.store_root = (self.cache / "toolchains").resolve()
        self.store = Store(self.store_root, self._progress)
        self.probes = ProbeCache(self.store_root / "probes")
        self.cuda_home, self.cuda_compiler = cuda_home, cuda_compiler
        self._offline, self._index_url = offline, index_url
        self._pinned = pinned
        if given is None and (named := os.environ.get("KERNEL_BUILDER_TREES")):
            given = {path.name: path.resolve() for path in Path(named).iterdir()}
        self._given = given or {}
        self.given_dependencies = header_libraries.given()
        # Every variant asks for them.
        self._in_directory = lru_cache(header_libraries.in_directory)
        self._find_host = lru_cache(host_compiler.find)

    @cached_property
    def lock(self) -> Lock:
        """The lock, by default the builder's own, which a Nix step does not have."""
        return self._pinned or lock.shipped()

    @cached_property
    def _index(self) -> Index:
        from kernel_builder.toolchain.index import Index  # takes 0.7 s, and most builds find all trees in the store

        return Index(self._index_url)

    def host(self, platform: str | None = None) -> HostCompiler:
        """Return the user's g++ for a platform, by default this machine's."""
        return self._find_host(self.probes, platform or this_platform())

    def component(self, name: str) -> ComponentFiles:
        """Return a component of a back end's toolchain, such as `cuda-13.0`."""
        tree = self._tree(name)
        if tree is None:
            raise ToolchainError(f"the lock does not have it for {this_platform()}", where=name, hint=_UPDATE)
        return ComponentFiles(self.fetch(tree), tree.version, tree.identity)

    def component_obstacle(self, name: str) -> Obstacle | None:
        """Return why a component is not available on this machine, or None if it can."""
        if self._tree(name):
            return None
        return Obstacle(f"needs {name}, which the lock does not have for {this_platform()}", _UPDATE)

    def _tree(self, name: str, platform: str | None = None) -> Tree | None:
        return lock.tree(self.lock, name, platform or this_platform())

    def derived(self, name: str, title: str, make: Callable[[Path], None]) -> Path:
        """Return a directory of the store that is derived from others, once.

        Args:
            name: Names it by its inputs.
            make: Fills the empty directory that it is given.
        """
        return self.store.obtain(name, title, lambda _, directory: make(directory))

    def torch(self, release: Release, subset: Subset, platform: str | None = None) -> HeaderLibrary:
        """Return the headers of a Torch release for a platform, by default this machine's.

        The stable ABI of a release before the first pinned one is targeted with the headers of the first: with
        TORCH_TARGET_VERSION they hide the additions of later releases.
        """
        releases = lock.torch_releases(self.lock)
        if subset == "stable" and releases:
            release = max(release, releases[0])
        name, target = torch_headers(release, subset), platform or this_platform()
        tree = self._tree(name, target)
        if tree is None:
            raise ToolchainError(
                f"its headers are not pinned for {target}; the lock has Torch {', '.join(map(str, releases))}",
                where=f"Torch {release}",
                hint="update kernel-builder, or add it with `kernel-builder toolchain update`",
            )
        root = self.fetch(tree)
        include = (root,) if subset == "stable" else (root, root / "torch/csrc/api/include")
        return HeaderLibrary("torch", root, include, tree.identity)

    def dependency(self, name: str) -> HeaderLibrary:
        """Return a header library: from the directory that the user gave for it, or else the pinned one."""
        if given := self.given_dependencies.get(name):
            return self._in_directory(name, given)
        if obstacle := self.dependency_obstacle(name):
            raise ToolchainError(obstacle.reason, where=name, hint=obstacle.hint)
        files = self.component(name)
        return HeaderLibrary(name, files.root, header_libraries.include_directories(files.root), files.identity)

    def dependency_obstacle(self, name: str) -> Obstacle | None:
        """Return why a header library is not available, or None if it can.

        Raises:
            ToolchainError: If the directory that the user gave does not have it.
        """
        if given := self.given_dependencies.get(name):
            header_libraries.check_directory(name, given)
            return None
        if name in self.lock:
            return None
        if library := header_libraries.KNOWN.get(name):
            pinned = [other for other in header_libraries.KNOWN if other in self.lock]
            return Obstacle(
                f"needs {name}, which no package index has",
                f"`git clone --depth 1 --branch v{library['version']} https://github.com/NVIDIA/cutlass DIR`, and set "
                f"KERNEL_BUILDER_DEPENDENCIES={name}=DIR; or depend on one that the index has: {', '.join(pinned)}",
            )
        return Obstacle(
            f"needs {name}, which this builder does not have",
            "copy the headers into the project, and name their directory in `include`",
        )

    def sysroot(self, platform: str | None = None, libraries: Sequence[str] = ()) -> stub_libraries.Sysroot:
        """Return the libraries to link against for a platform, made once for each host compiler.

        Args:
            libraries: The libraries that it needs empty stubs of, besides those of every sysroot.
        """
        compiler = self.host(platform)
        more = sorted({*libraries} - {*stub_libraries.UNVERSIONED_LIBRARIES})
        of_more = f"-{hashlib.sha256(repr(more).encode()).hexdigest()[:16]}" if more else ""
        root = self.derived(
            f"sysroot-{stub_libraries.RECIPE}-{compiler.identity[:16]}{of_more}",
            f"stub libraries of g++ {compiler.version} for {compiler.platform}",
            lambda directory: stub_libraries.make(compiler, directory, more),
        )
        return stub_libraries.Sysroot(root, compiler.platform)

    def pinned(self, platform: str | None = None) -> list[Tree]:
        """Return every tree of the lock for builds on this machine, by default for its own platform.

        Those with compilers of Triton and CuTe DSL are left out. For another platform only Torch's headers are its own.
        """
        languages = tuple(f"{language}-" for language in matrix.load().kernel_language)
        names = [name for name in self.lock if not name.startswith(languages)]
        trees = (self._tree(name, platform if name.startswith("torch-") else None) for name in names)
        return [tree for tree in trees if tree]

    def fetch(self, tree: Tree) -> Path:
        """Return the directory of a pinned tree's files, and download them first if they are not in the store."""
        is_foreign = tree.platform not in (lock.ANY, this_platform())
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
            # With the digest in the name, a partial download of a different file is never continued.
            downloads = {pin: scratch / f"{pin.project}-{pin.fetched[:16]}.part" for pin in tree.files}
            before = 0
            for pin, download in downloads.items():

                def report(done: int, before: int = before) -> None:
                    self._progress.advance(tree.title, before + done, tree.download, unit="bytes")

                self._index.fetch(pin, download, report)
                before += pin.download
            for pin, download in downloads.items():
                archives.unpack(pin, download, directory)

        return self.store.obtain(tree.name, tree.title, make)
