"""How a toolchain's directory is made from slices of wheels."""

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

# Raise when the rules below give another directory for the same lock, so that one made by an older builder is not used.
RECIPE = 1

# The stable ABI's headers, and all that they include.
_STABLE = (
    "ATen/Config.h",
    "torch/csrc/inductor/aoti_torch/c/",
    "torch/csrc/inductor/aoti_torch/generated/",
    "torch/csrc/stable/",
    "torch/headeronly/",
)
TORCH_PREFIX = "torch/include/"


def cuda_prefix(release: Release) -> str:
    """Where the wheels of a CUDA release keep their files."""
    return f"nvidia/cu{release.major}/"


def keep_cuda(name: str) -> bool:
    """Whether a file of the CUDA wheels is needed. The library of the device compiler is not: nvcc runs its program."""
    return not name.startswith("lib/libnvvm.so")


def keep_torch(subset: Subset) -> Callable[[str], bool]:
    """Which of Torch's headers belong to a subset, by their name as an `#include` gives it."""
    return (lambda name: name.startswith(_STABLE)) if subset == "stable" else (lambda name: True)


@dataclass(frozen=True)
class Tree:
    """One directory of the store that comes from the index.

    Attributes:
        title: E.g. `CUDA 13.0`, for people.
        prefix: Start of the names in the wheels, left out in the directory.
        keep: Which names after the prefix to keep.
    """

    kind: str
    title: str
    platform: str
    wheels: tuple[Wheel, ...]
    prefix: str
    keep: Callable[[str], bool]

    @property
    def identity(self) -> str:
        """Digest of the pinned content and the recipe; equal on every machine."""
        pinned = [RECIPE, self.kind, self.platform, [wheel.record for wheel in self.wheels]]
        return hashlib.sha256(json.dumps(pinned).encode()).hexdigest()

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{self.kind}-{self.platform}-{self.identity[:16]}"

    @property
    def download(self) -> int:
        """Bytes to fetch."""
        return sum(wheel.download for wheel in self.wheels)

    @property
    def unpacked(self) -> int:
        """Bytes of its files."""
        return sum(wheel.unpacked for wheel in self.wheels)


def cuda_tree(cuda: CudaPin, platform: str) -> Tree:
    """The toolkit of a CUDA release. The platform must be one that is pinned."""
    return Tree(
        f"cuda-{cuda.release}",
        f"CUDA {cuda.release}",
        platform,
        cuda.platforms[platform],
        cuda_prefix(cuda.release),
        keep_cuda,
    )


def torch_tree(torch: TorchPin, platform: str, subset: Subset) -> Tree:
    """The headers of a Torch release. The platform must be one that is pinned."""
    return Tree(
        f"torch-{torch.release}-{subset}",
        f"Torch {torch.release} headers ({subset})",
        platform,
        (torch.platforms[platform][subset],),
        TORCH_PREFIX,
        keep_torch(subset),
    )


def fill(tree: Tree, index: Index, scratch: Path, directory: Path, progress: Progress) -> None:
    """Download what a tree needs, check it, and unpack it.

    Args:
        scratch: Keeps downloads, whole and half, from one try to the next.
        directory: Empty; may be left half filled by an error.

    Raises:
        FetchError: If the index cannot be reached, or sent something else than the lock pins; what was wrong is then
            removed from `scratch`.
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
                hint="try again; if it stays so, something between here and the index alters files: use another index "
                "(`--index-url`)",
            ) from error


def _part(scratch: Path, wheel: Wheel, start: int, stop: int) -> Path:
    # The digest is in the name so that a part of another wheel of the same name is never gone on with.
    return scratch / f"{wheel.project}-{wheel.sha256[:16]}-{start}-{stop}.part"


def map_file(path: Path) -> memoryview:
    """The bytes of a file, mapped."""
    with path.open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def unpack(tree: Tree, wheel: Wheel, slices: Iterable[memoryview], directory: Path) -> None:
    """Write the files that a tree has of a wheel.

    Args:
        slices: The bytes of the wheel's ranges.

    Raises:
        wheels.CorruptWheel: If they are not what the lock pins.
    """
    for name, content in wheels.checked(slices, wheel.record, tree.prefix, tree.keep):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        # The executable bit stands only in the wheel's directory, which is not fetched.
        if path.parent.name == "bin" and content.startswith((b"\x7fELF", b"#!")):
            path.chmod(0o755)
