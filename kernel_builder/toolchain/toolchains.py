"""The room's front: asks the lock, the store and the providers, in that order, and fetches what is missing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from kernel_builder.config.variant import Release, this_platform
from kernel_builder.errors import FetchError, ToolchainError
from kernel_builder.progress import Progress, Silent
from kernel_builder.toolchain import host_compiler, lock, sysroot, system_cuda, wheel_trees
from kernel_builder.toolchain.probe_cache import ProbeCache
from kernel_builder.toolchain.store import Store
from kernel_builder.toolchain.tools import CudaToolkit, HostCompiler, Obstacle, Subset, TorchHeaders


def default_cache() -> Path:
    """Where the builder keeps what it can make again: KERNEL_BUILDER_CACHE, else the user's cache directory."""
    if named := os.environ.get("KERNEL_BUILDER_CACHE"):
        return Path(named).absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("kernel-builder"))


def _given() -> Mapping[str, Path]:
    named = os.environ.get("KERNEL_BUILDER_TREES")
    return {path.name: path.resolve() for path in Path(named).iterdir()} if named else {}


class Toolchains:
    """The toolchains of one invocation.

    Args:
        cache: The cache directory; the store is below it.
        cuda_home: A toolkit of the user's, which stands in for the pinned one of its release; else CUDA_HOME.
        cxx: The host compiler; else CXX, else g++.
        offline: Never ask the network.
        index_url: The index; else what pip or uv is set to use, else the default one.
        pinned: The lock; else the one that comes with the builder.
        given: Kind of a pinned tree, e.g. `cuda-13.0` -> where its files are, for a provider that has its own store;
            else the entries of the directory KERNEL_BUILDER_TREES.
    """

    def __init__(
        self,
        *,
        cache: Path | None = None,
        cuda_home: Path | None = None,
        cxx: str | None = None,
        offline: bool = False,
        progress: Progress | None = None,
        index_url: str | None = None,
        pinned: lock.Lock | None = None,
        given: Mapping[str, Path] | None = None,
    ) -> None:
        self.cache = cache or default_cache()
        self._progress = progress or Silent()
        # With symbolic links resolved: compiler caches remember a compiler by its path.
        self.store = Store((self.cache / "toolchains").resolve(), self._progress)
        self._probes = ProbeCache(self.store.root / "facts")
        self._cuda_home, self._cxx = cuda_home, cxx
        self._offline, self._index_url = offline, index_url
        self._pinned = pinned
        self._given = _given() if given is None else given

    @cached_property
    def lock(self) -> lock.Lock:
        """What is pinned."""
        return self._pinned or lock.shipped()

    def host(self) -> HostCompiler:
        """The user's g++.

        Raises:
            ToolchainError: If there is none, or it is not usable.
        """
        return host_compiler.find(self._probes, self._cxx)

    def system_cuda(self) -> CudaToolkit | None:
        """The toolkit that the user named, if any.

        Raises:
            ToolchainError: If what was named is not a toolkit.
        """
        return system_cuda.find(self._probes, self._cuda_home)

    def cuda(self, release: Release) -> CudaToolkit:
        """The toolkit of a CUDA release: the user's where it is of this release, else the pinned one.

        Raises:
            ToolchainError: If no provider has it; `cuda_obstacle` says so without trying.
            FetchError, StoreError: If it cannot be fetched or kept.
        """
        found = self.system_cuda()
        if found and found.release == release:
            return found
        if obstacle := self.cuda_obstacle(release, this_platform()):
            raise ToolchainError(obstacle.reason, where=f"CUDA {release}", hint=obstacle.hint)
        tree = wheel_trees.cuda_tree(self.lock.cuda[release], this_platform())
        root = self.fetch(tree)
        nvcc = root / "bin/nvcc"
        version, capabilities = system_cuda.ask(self._probes, nvcc)
        return CudaToolkit(
            root=root,
            release=release,
            version=version,
            nvcc=nvcc,
            include=system_cuda.include_directories(root),
            lib=root / "lib",
            identity=tree.identity,
            origin="index",
            capabilities=capabilities,
        )

    def torch(self, release: Release, subset: Subset) -> TorchHeaders:
        """The headers of a Torch release.

        Raises:
            ToolchainError: If they are not pinned for this platform.
            FetchError, StoreError: If they cannot be fetched or kept.
        """
        pinned = self.lock.torch.get(release)
        if pinned is None or this_platform() not in pinned.platforms:
            raise ToolchainError(
                f"its headers are not pinned for {this_platform()}; pinned are those of "
                f"{', '.join(map(str, self.lock.torch))}",
                where=f"Torch {release}",
                hint="a newer kernel-builder may have it; or add it to `matrix.toml` and run `kernel-builder toolchain "
                "lock`",
            )
        tree = wheel_trees.torch_tree(pinned, this_platform(), subset)
        root = self.fetch(tree)
        include = (root,) if subset == "stable" else (root, root / "torch/csrc/api/include")
        return TorchHeaders(release, pinned.version, subset, include, tree.identity)

    def sysroot(self) -> sysroot.Sysroot:
        """What binaries are linked against, made once for each host compiler.

        Raises:
            ToolchainError: If there is no usable host compiler, or a runtime library is missing.
        """
        compiler = self.host()
        root = self.store.obtain(
            f"sysroot-{sysroot.RECIPE}-{compiler.identity[:16]}",
            f"stand-in libraries of g++ {compiler.version}",
            0,
            lambda _, directory: sysroot.make(compiler.path, directory),
        )
        return sysroot.Sysroot(root)

    def cuda_obstacle(self, release: Release, platform: str) -> Obstacle | None:
        """Why this machine cannot have a CUDA release's toolkit for a platform, or None where it can. No network.

        Raises:
            ToolchainError: If the toolkit that the user named is not one.
        """
        here = this_platform()
        if platform != here:
            return Obstacle(
                f"this machine is {here}, and binaries are made on the platform they run on",
                f"run the same command on a machine or CI runner that is {platform}",
            )
        found = self.system_cuda()
        if found and found.release == release:
            return None
        pinned = self.lock.cuda.get(release)
        if pinned and platform in pinned.platforms:
            return None
        has = f"; {found.root} is CUDA {found.release}" if found else ""
        return Obstacle(
            f"no complete compiler of CUDA {release} is pinned for {platform}{has}",
            f"install the CUDA toolkit {release} and give its directory, e.g. `--cuda-home /usr/local/cuda-{release}`",
        )

    def pinned(self) -> list[wheel_trees.Tree]:
        """Every tree that the lock has for this platform."""
        here = this_platform()
        found = [wheel_trees.cuda_tree(cuda, here) for cuda in self.lock.cuda.values() if here in cuda.platforms]
        subsets: tuple[Subset, ...] = ("stable", "full")
        found += [
            wheel_trees.torch_tree(torch, here, subset)
            for torch in self.lock.torch.values()
            if here in torch.platforms
            for subset in subsets
        ]
        return found

    def fetch(self, tree: wheel_trees.Tree) -> Path:
        """The files of a pinned tree, downloaded now if they are not in the store.

        Raises:
            FetchError, StoreError: If they cannot be fetched or kept.
        """
        if found := self._given.get(tree.kind) or self.store.find(tree.name):
            return found
        if self._offline:
            raise FetchError(
                f"is not in the store at {self.store.root}, and the network is not to be used",
                where=tree.title,
                hint="run `kernel-builder toolchain fetch` beforehand, or leave out `--offline`",
            )
        from kernel_builder.toolchain.index import Index

        def make(scratch: Path, directory: Path) -> None:
            wheel_trees.fill(tree, Index(self._index_url), scratch, directory, self._progress)

        return self.store.obtain(tree.name, tree.title, tree.download + tree.unpacked, make)
