"""Memory that a kernel leaves unwritten shows: allocations are filled before the kernel gets them.

A result of `torch.empty` has the content of memory that was freed before, which may be the reference's own result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

POISON = 0x7F
"""The byte that fills memory. As float32 and bfloat16 it is 3.4e38, as float16 not a number, as an integer large."""

_M_PERTURB = -6  # of mallopt, in glibc's <malloc.h>
_BLOCKS = 4  # of each size, for a kernel that allocates several
_LARGE = 1 << 30


@contextmanager
def poisoned(device: str, sizes: Iterable[int] = ()) -> Iterator[None]:
    """Fill the memory that is allocated in this context, or that was freed before it, with `POISON`.

    On the CPU, glibc fills all that `malloc` returns, except for blocks of up to 1 KB that the same thread has freed.
    On a GPU, the free blocks of Torch's allocator are filled that fit the sizes.

    Args:
        device: "cpu" or "cuda".
        sizes: Bytes of the tensors that the kernel is expected to allocate; used on a GPU only.
    """
    if device != "cpu":
        held = [
            torch.full((size,), POISON, dtype=torch.uint8, device=device)
            for size in sizes
            for _ in range(_BLOCKS if size < _LARGE else 1)
        ]
        del held
        yield
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        yield
        return
    try:
        libc.mallopt(_M_PERTURB, POISON ^ 0xFF)  # glibc fills with the complement
        yield
    finally:
        libc.mallopt(_M_PERTURB, 0)
