"""Directories of the store that are made from pinned files: toolkits, headers of Torch, header libraries."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kernel_builder.errors import FetchError
from kernel_builder.progress import Progress
from kernel_builder.toolchain import sdists, wheels
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.lock import ClangPin, ComponentPin, CudaPin, DependencyPin, PinnedFile, TorchPin
from kernel_builder.toolchain.tools import Subset

# Increase when equal pinned files are unpacked to different trees: trees of older builders are then not used.
RECIPE = 1

# The program of the ziglang wheel, which is clang too.
ZIG = "zig"

TreeRole = Literal["compiler", "libraries", "torch", "dependency", "component"]


@dataclass(frozen=True)
class Tree:
    """One directory of the store that is made from pinned files.

    Attributes:
        kind: For example `cuda-13.0` or `torch-2.10-stable`.
        title: The name in messages, for example `CUDA 13.0`.
        platform: `any` if it is the same on all platforms.
    """

    role: TreeRole
    kind: str
    title: str
    platform: str
    files: tuple[PinnedFile, ...]

    @property
    def identity(self) -> str:
        """Digest of the pinned content and the recipe, equal on every machine."""
        pinned = [RECIPE, self.kind, self.platform, [file.identity for file in self.files]]
        if self.role == "component":  # whose name says nothing of what is taken of a wheel
            pinned.append([file.take for file in self.files])
        return hashlib.sha256(json.dumps(pinned).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The name in the store."""
        return f"{self.kind}-{self.platform}-{self.identity[:16]}"

    @property
    def download(self) -> int:
        """Bytes to download."""
        return sum(file.download for file in self.files)

    @property
    def unpacked(self) -> int:
        """Bytes of the files on disk."""
        return sum(file.unpacked for file in self.files)


def cuda_tree(cuda: CudaPin, platform: str) -> Tree:
    """Return the toolkit of a CUDA release. The lock must have the platform."""
    return Tree("compiler", f"cuda-{cuda.release}", f"CUDA {cuda.release}", platform, cuda.platforms[platform])


def clang_tree(clang: ClangPin, platform: str) -> Tree:
    """Return clang with its headers. The lock must have the platform."""
    major = clang.version.partition(".")[0]
    return Tree("compiler", f"clang-{major}", f"clang {major}", platform, clang.platforms[platform])


def libraries_tree(cuda: CudaPin, platform: str) -> Tree:
    """Return the headers of the libraries of a CUDA release. The lock must have the platform."""
    kind, title = f"cuda-libraries-{cuda.release}", f"CUDA {cuda.release} library headers"
    return Tree("libraries", kind, title, platform, cuda.libraries[platform])


def torch_tree(torch: TorchPin, platform: str, subset: Subset) -> Tree:
    """Return the headers of a Torch release. The lock must have the platform."""
    kind, title = f"torch-{torch.release}-{subset}", f"Torch {torch.release} headers ({subset})"
    return Tree("torch", kind, title, platform, (torch.platforms[platform][subset],))


def dependency_tree(pin: DependencyPin) -> Tree:
    """Return a header library."""
    return Tree("dependency", pin.name, f"CUTLASS {pin.version} headers", "any", pin.files)


def component_tree(pin: ComponentPin) -> Tree:
    """Return what the compiler of a back end needs besides itself."""
    return Tree("component", pin.name, pin.title, "any", pin.files)


def fill(tree: Tree, index: Index, scratch: Path, directory: Path, progress: Progress) -> None:
    """Download the byte ranges that a tree needs, check them, and unpack them.

    Args:
        scratch: Keeps complete and partial downloads between attempts.
        directory: An empty directory; an error may leave it half filled.

    Raises:
        FetchError: If the index cannot be reached, or if its bytes differ from the lock; such bytes are removed from
            `scratch`.
        OSError: If the disk is full or cannot be written.
    """
    total, before = tree.download, 0
    for pin in tree.files:
        for start, stop in pin.ranges:
            offset = before

            def report(done: int, offset: int = offset) -> None:
                progress.advance(tree.title, offset + done, total, unit="bytes")

            index.fetch(pin, start, stop, _part(scratch, pin, start, stop), report)
            before += stop - start
    for pin in tree.files:
        try:
            unpack(pin, [map_file(_part(scratch, pin, start, stop)) for start, stop in pin.ranges], directory)
        except wheels.CorruptDownload as error:
            for start, stop in pin.ranges:
                _part(scratch, pin, start, stop).unlink()
            raise FetchError(
                f"the download is not what the lock pins: {error}",
                where=f"{pin.file} at {index.url}",
                hint="try again; if the error stays, the index or a proxy alters files: use another index "
                "(`--index-url`)",
            ) from error


def _part(scratch: Path, pin: PinnedFile, start: int, stop: int) -> Path:
    # With the digest in the name, a partial download of a different file is never continued.
    return scratch / f"{pin.project}-{pin.sha256[:16]}-{start}-{stop}.part"


def map_file(path: Path) -> memoryview:
    """Map a file into memory."""
    with path.open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def unpack(pin: PinnedFile, slices: Sequence[memoryview], directory: Path) -> None:
    """Write what is kept of one pinned file.

    Args:
        slices: The bytes of the file's ranges, in order.

    Raises:
        wheels.CorruptDownload: If the bytes are not what the lock pins.
    """

    def keep(name: str) -> bool:
        return name.startswith(pin.take)

    if pin.record is None:
        files = sdists.checked(slices[0], pin.sha256, pin.prefix, keep)
    else:
        files = wheels.checked(slices, pin.record, pin.prefix, keep)
    for name, content in files:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        # Only the zip directory has the executable bit, and it is not downloaded.
        if (path.parent.name == "bin" or name == ZIG) and content.startswith((b"\x7fELF", b"#!")):
            path.chmod(0o755)
