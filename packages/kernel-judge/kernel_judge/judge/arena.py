"""Memory that the judge shares with a worker: tensors at offsets of one block, on the CPU or on a GPU.

The judge writes inputs into one arena, and the worker copies results into another. No tensor is pickled on the way
back, so nothing of the worker is ever unpickled.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kernel_judge.judge.gpu_memory import GpuBlock

# Pages get memory when they are first written.
_CPU_BYTES = 64 << 30
_ALIGNMENT = 256


class Slot(NamedTuple):
    """The place and layout of one tensor in an arena."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class ArenaView:
    """An arena as a process sees it: an `mmap`, or all bytes as one tensor on a GPU."""

    def __init__(self, block: Any) -> None:
        self._block = block

    @classmethod
    def opened(cls, handle: Any) -> ArenaView:
        """Open an arena in a worker by the handle that the judge has sent."""
        if isinstance(handle, tuple):
            size, name = handle
            return cls(GpuBlock(size, name).tensor())
        return cls(mmap.mmap(handle, _CPU_BYTES))

    def tensor(self, slot: Slot) -> torch.Tensor:
        """Return the tensor of a slot; it shares the arena's memory."""
        offset, shape, stride, name = slot
        dtype: torch.dtype = getattr(torch, name)
        elements = _extent(shape, stride)
        if not elements:
            device = "cpu" if isinstance(self._block, mmap.mmap) else self._block.device
            return torch.empty(shape, dtype=dtype, device=device)
        if isinstance(self._block, mmap.mmap):
            flat = torch.frombuffer(self._block, dtype=dtype, count=elements, offset=offset)
        else:
            flat = self._block[offset : offset + elements * dtype.itemsize].view(dtype)
        return flat.as_strided(shape, stride)

    def addresses(self) -> range:
        """Return the addresses of the arena in this process."""
        size = len(self._block) if isinstance(self._block, mmap.mmap) else self._block.nbytes
        start = self.raw(1).data_ptr()
        return range(start, start + size)

    def raw(self, end: int) -> torch.Tensor:
        """Return the bytes before `end`."""
        if isinstance(self._block, mmap.mmap):
            return torch.frombuffer(self._block, dtype=torch.uint8, count=max(end, 1))
        whole: torch.Tensor = self._block[: max(end, 1)]
        return whole


class Arena(ArenaView):
    """An arena that this process owns.

    `handle` opens it in a worker: an inherited file descriptor, or on a GPU the size and the driver's handle. `end` is
    the end of the tensors that were placed last.
    """

    def __init__(self, device: str, size: int) -> None:
        self.size = _CPU_BYTES if device == "cpu" else size
        self.end = 0
        self._largest_end = 0
        self._descriptor: int | None = None
        if device == "cpu":
            self._descriptor = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, _CPU_BYTES)
            # If a worker could truncate it, SIGBUS would end this process.
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self.handle: Any = self._descriptor
            super().__init__(mmap.mmap(self._descriptor, _CPU_BYTES))
        else:
            block = GpuBlock(size)
            self.handle = size, block.handle
            super().__init__(block.tensor())

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors that a worker must inherit."""
        return () if self._descriptor is None else (self._descriptor,)

    def excess(self) -> int:
        """Return the bytes of memory beyond all tensors so far: a worker can write anywhere in an arena on the CPU."""
        if self._descriptor is None:
            return 0
        return max(0, os.fstat(self._descriptor).st_blocks * 512 - self._largest_end)

    def close(self) -> None:
        """Free the memory, once no tensor of it is in use."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._block = None

    def clear(self) -> None:
        """Forget all tensors; the next ones reuse their addresses."""
        self.end = 0

    def write(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Copy a tensor with a slot's strides; elements that share memory share it in the arena, too."""
        length = (_extent(slot.shape, slot.stride),)
        self.tensor(slot).as_strided(length, (1,)).copy_(tensor.as_strided(length, (1,)))

    def reserve(self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Slot:
        """Make room for a tensor, contiguous unless strides are given."""
        stride = torch.empty(shape, device="meta").stride() if stride is None else stride
        slot = Slot(self.end, tuple(shape), tuple(stride), str(dtype).removeprefix("torch."))
        used = _extent(slot.shape, slot.stride) * dtype.itemsize
        self.end = -(-(self.end + used) // _ALIGNMENT) * _ALIGNMENT
        self._largest_end = max(self._largest_end, self.end)
        return slot


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements of memory a tensor spans."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
