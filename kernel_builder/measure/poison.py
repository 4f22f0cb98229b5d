"""Memory that a kernel leaves unwritten shows: allocations are filled before the kernel gets them.

A result of `torch.empty` has the content of memory that was freed before, which may be the reference's own result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

POISON = 0x7F
"""The byte that fills memory. As float32 and bfloat16 it is 3.4e38, as float16 not a number, as an integer large."""

_M_PERTURB = -6  # of mallopt, in glibc's <malloc.h>
_BLOCKS = 4  # of each size, for a kernel that allocates several
_LARGE = 1 << 30
# glibc keeps small blocks that a thread has freed for its next calls, and does not fill these. A call that finds none
# there takes a block from the heap's free ones, which it fills, and keeps others of that size, which it does not.
_KEPT_SIZES = range(1032, 0, -16)  # a larger block leaves smaller ones when it is split
_IN_A_ROW = 3  # of filled blocks: no other is kept
_MOST_BLOCKS = 4096  # of a size: another allocator in place of glibc's fills nothing
_TAKEN = 0x5B  # fills the blocks that are taken; memory that an earlier context has filled is not one of these


@contextmanager
def poisoned(device: str, sizes: Iterable[int] = ()) -> Iterator[None]:
    """Fill the memory that is allocated in this context, or that was freed before it, with `POISON`.

    On the CPU, glibc fills all that `malloc` returns, but for blocks of up to 1 KB that the same thread freed within
    the context. On a GPU, the free blocks of Torch's allocator are filled that fit the sizes.

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
    kept: list[tuple[int, int]] = []
    try:
        libc.mallopt(_M_PERTURB, _TAKEN ^ 0xFF)  # glibc fills with the complement
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        for size in _KEPT_SIZES:
            kept += [(block, size) for block in _kept_blocks(libc.malloc, size)]
        libc.mallopt(_M_PERTURB, POISON ^ 0xFF)
        yield
    finally:
        libc.mallopt(_M_PERTURB, 0)
        libc.free.argtypes = [ctypes.c_void_p]
        for block, size in kept:
            ctypes.memset(block, 0, size)
            libc.free(block)


def _kept_blocks(malloc: Callable[[int], int], size: int) -> Iterator[int]:
    """Allocate the blocks that this thread has freed and glibc keeps for it, and a few more."""
    filled = bytes([_TAKEN]) * size
    in_a_row = 0
    for _ in range(_MOST_BLOCKS):
        block = malloc(size)
        yield block
        in_a_row = in_a_row + 1 if ctypes.string_at(block, size) == filled else 0
        if in_a_row == _IN_A_ROW:
            return
