"""Memory of a GPU: blocks that two processes share, by the driver's own functions, and memory that has run out.

Torch's sharing frees a block only when every process that has opened it says that it is done, which a worker that is
killed never does.
"""

from __future__ import annotations

import ctypes
import gc
import re
import time
from typing import Any

import torch

from kernel_format.errors import MeasureError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # the only flag that `cuIpcOpenMemHandle` takes, and it must be given
# Messages of Torch, the driver, cuBLAS, cuDNN and Triton.
_MESSAGES = re.compile(r"out of memory|OutOfMemory|OUT_OF_MEMORY|ALLOC_FAILED|can't allocate memory|^MemoryError")
_OTHERS = 0.1  # of the memory: a candidate that runs out of the rest alone needs too much
_CONTEXT_BYTES = 1 << 30  # of this process, beside Torch's blocks
_RELEASE_SECONDS = 5.0  # in which the driver frees the memory of processes that were killed


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * _HANDLE_BYTES),)


class GpuBlock:
    """Bytes on the current GPU, freed when the last tensor of them is gone.

    `handle` opens the block in another process; without one, the block is allocated.
    """

    def __init__(self, size: int, handle: bytes | None = None) -> None:
        self._pointer = ctypes.c_uint64(0)
        self._driver = ctypes.CDLL("libcuda.so.1")
        torch.cuda.synchronize()  # the driver's functions need Torch's context
        self._size = size
        self._is_own = handle is None
        address = ctypes.byref(self._pointer)
        if handle is None:
            self._checked("cuMemAlloc_v2", address, ctypes.c_size_t(size))
            shared = _Handle()
            self._checked("cuIpcGetMemHandle", ctypes.byref(shared), self._pointer)
            self.handle = bytes(shared.data)
        else:
            self.handle = handle
            shared = _Handle.from_buffer_copy(handle)
            self._checked("cuIpcOpenMemHandle_v2", address, shared, ctypes.c_uint(_LAZY_PEER_ACCESS))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._pointer.value, False), "version": 3}

    def tensor(self) -> torch.Tensor:
        """Return the bytes as a tensor, which keeps the block."""
        return torch.as_tensor(self, device="cuda")

    def __del__(self) -> None:
        if self._pointer.value:
            release = self._driver.cuMemFree_v2 if self._is_own else self._driver.cuIpcCloseMemHandle
            release(self._pointer)

    def _checked(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._driver, function)(*arguments):
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(name))
            text = (name.value or b"").decode() or f"error {status}"
            raise MeasureError(
                f"{function} of {self._size >> 20} MiB answers {text}",
                where="GPU memory that the judge shares with a worker",
                hint="end other processes on this GPU (nvidia-smi lists them)",
            )


def is_exhausted(text: str) -> bool:
    """Return whether an error's name and message report that memory ran out."""
    return _MESSAGES.search(text) is not None


def taken_by_others() -> str:
    """Return a sentence if other processes hold much of this GPU's memory; empty if not. No worker may run."""
    gc.collect()  # tensors of the judge
    end = time.monotonic() + _RELEASE_SECONDS
    while True:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved() - _CONTEXT_BYTES
        if not is_much(others, total):
            return ""
        if time.monotonic() > end:
            held = f"other processes hold {others / 1e9:.3g} of the GPU's {total / 1e9:.3g} GB"
            return f"{held}; end them (nvidia-smi lists them), and judge again"
        time.sleep(0.1)


def is_much(others: int, total: int) -> bool:
    """Return whether a candidate that runs out of memory may be right without the other processes."""
    return others > _OTHERS * total
