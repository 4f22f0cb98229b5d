"""GPU memory that has run out: whether the candidate, or other processes on the GPU, have taken it."""

from __future__ import annotations

import gc
import re
import time

import torch

# Messages of Torch, the driver, cuBLAS, cuDNN and Triton.
_MESSAGES = re.compile(r"out of memory|OutOfMemory|OUT_OF_MEMORY|ALLOC_FAILED|can't allocate memory|^MemoryError")
_OTHERS = 0.1  # of the memory: a candidate that runs out of the rest alone needs too much
_CONTEXT_BYTES = 1 << 30  # of this process, beside Torch's blocks
_RELEASE_SECONDS = 5.0  # in which the driver frees the memory of processes that were killed


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
            return (
                f"other processes hold {others / 1e9:.3g} of the GPU's {total / 1e9:.3g} GB; end them (nvidia-smi "
                "lists them), and judge again"
            )
        time.sleep(0.1)


def is_much(others: int, total: int) -> bool:
    """Return whether a candidate that runs out of memory may be right without the other processes."""
    return others > _OTHERS * total
