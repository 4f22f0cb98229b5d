"""Which files of which wheels make up a toolchain's directory, and how they are unpacked."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kernel_builder.config.variant import Release
from kernel_builder.errors import FetchError
from kernel_builder.progress import Progress
from kernel_builder.toolchain import wheels
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.lock import CudaPin, TorchPin, Wheel
from kernel_builder.toolchain.tools import Subset

# Increase when the rules below produce different files from the same lock: trees of older builders are then not used.
RECIPE = 1

# The stable ABI's headers, and every header that they include.
_STABLE = (
    "ATen/Config.h",
    "torch/csrc/inductor/aoti_torch/c/",
    "torch/csrc/inductor/aoti_torch/generated/",
    "torch/csrc/stable/",
    "torch/headeronly/",
)
TORCH_PREFIX = "torch/include/"


def cuda_prefix(release: Release) -> str:
    """Return the directory in the wheels of a CUDA release that holds their files."""
    return f"nvidia/cu{release.major}/"


def keep_cuda(name: str) -> bool:
    """Return whether a file of the CUDA wheels is needed. libnvvm.so is not: nvcc runs the program cicc instead."""
    return not name.startswith("lib/libnvvm.so")


def keep_torch(subset: Subset) -> Callable[[str], bool]:
    """Return a function that says whether a header, named as in an `#include`, belongs to a subset."""
    return (lambda name: name.startswith(_STABLE)) if subset == "stable" else (lambda name: True)


@dataclass(frozen=True)
class Tree:
    """One directory of the store that is made from wheels.

    Attributes:
        kind: For example `cuda-13.0` or `torch-2.10-stable`.
        title: The name in messages, for example `CUDA 13.0`.
        prefix: The directory in the wheels that becomes the root of the tree.
        keep: Whether a file, named relative to `prefix`, belongs to the tree.
    """

    kind: str
    title: str
    platform: str
    wheels: tuple[Wheel, ...]
    prefix: str
    keep: Callable[[str], bool]

    @property
    def identity(self) -> str:
        """Digest of the pinned content and the recipe, equal on every machine."""
        pinned = [RECIPE, self.kind, self.platform, [wheel.record for wheel in self.wheels]]
        return hashlib.sha256(json.dumps(pinned).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The name in the store."""
        return f"{self.kind}-{self.platform}-{self.identity[:16]}"

    @property
    def download(self) -> int:
        """Bytes to download."""
        return sum(wheel.download for wheel in self.wheels)

    @property
    def unpacked(self) -> int:
        """Bytes of the files on disk."""
        return sum(wheel.unpacked for wheel in self.wheels)


def cuda_tree(cuda: CudaPin, platform: str) -> Tree:
    """Return the toolkit of a CUDA release. The lock must have the platform."""
    return Tree(
        f"cuda-{cuda.release}",
        f"CUDA {cuda.release}",
        platform,
        cuda.platforms[platform],
        cuda_prefix(cuda.release),
        keep_cuda,
    )


def torch_tree(torch: TorchPin, platform: str, subset: Subset) -> Tree:
    """Return the headers of a Torch release. The lock must have the platform."""
    return Tree(
        f"torch-{torch.release}-{subset}",
        f"Torch {torch.release} headers ({subset})",
        platform,
        (torch.platforms[platform][subset],),
        TORCH_PREFIX,
        keep_torch(subset),
    )


def fill(tree: Tree, index: Index, scratch: Path, directory: Path, progress: Progress) -> None:
    """Download the wheels' byte ranges that a tree needs, check them, and unpack them.

    Args:
        scratch: Keeps complete and partial downloads between attempts.
        directory: An empty directory; an error may leave it half filled.

    Raises:
        FetchError: If the index cannot be reached, or if its bytes differ from the lock; such bytes are removed from
            `scratch`.
        OSError: If the disk is full or cannot be written.
    """
    total, before = tree.download, 0
    for wheel in tree.wheels:
        for start, stop in wheel.ranges:
            offset = before

            def report(done: int, offset: int = offset) -> None:
                progress.advance(tree.title, offset + done, total, unit="bytes")

            index.fetch(wheel, start, stop, _part(scratch, wheel, start, stop), report)
            before += stop - start
    for wheel in tree.wheels:
        try:
            slices = [map_file(_part(scratch, wheel, start, stop)) for start, stop in wheel.ranges]
            unpack(tree, wheel, slices, directory)
        except wheels.CorruptWheel as error:
            for start, stop in wheel.ranges:
                _part(scratch, wheel, start, stop).unlink()
            raise FetchError(
                f"the download is not what the lock pins: {error}",
                where=f"{wheel.file} at {index.url}",
                hint="try again; if the error stays, the index or a proxy alters files: use another index "
                "(`--index-url`)",
            ) from error


def _part(scratch: Path, wheel: Wheel, start: int, stop: int) -> Path:
    # With the digest in the name, a partial download of a different wheel is never continued.
    return scratch / f"{wheel.project}-{wheel.sha256[:16]}-{start}-{stop}.part"


def map_file(path: Path) -> memoryview:
    """Map a file into memory."""
    with path.open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def unpack(tree: Tree, wheel: Wheel, slices: Iterable[memoryview], directory: Path) -> None:
    """Write the files of one wheel that belong to a tree.

    Args:
        slices: The bytes of the wheel's ranges, in order.

    Raises:
        wheels.CorruptWheel: If the bytes are not what the lock pins.
    """
    for name, content in wheels.checked(slices, wheel.record, tree.prefix, tree.keep):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        # Only the zip directory has the executable bit, and it is not downloaded.
        if path.parent.name == "bin" and content.startswith((b"\x7fELF", b"#!")):
            path.chmod(0o755)
