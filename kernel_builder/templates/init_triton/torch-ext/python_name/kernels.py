"""`${operator}` in Triton: the kernels, and the functions that launch them.

aot.toml names the launch functions. Keep them simple: checks, outputs, sizes and one launch. In packages that are compiled
ahead of time, ops of the same names replace this module.
"""

import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (1024, 2048, 4096) for warps in (4, 8)]


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def forward_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, tl.where(x <= 0, 0.0, x), mask=offsets < n)


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def backward_kernel(grad_ptr, x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    grad = tl.load(grad_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, tl.where(x <= 0, 0.0, grad), mask=offsets < n)


def ${operator}_forward(x: torch.Tensor) -> torch.Tensor:
    """Return the result for a contiguous tensor."""
    assert x.is_contiguous()
    n = x.numel()
    out = torch.empty_like(x)
    forward_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    return out


def ${operator}_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient with respect to `x`, for contiguous tensors of one shape."""
    assert grad.is_contiguous() and x.is_contiguous()
    assert grad.numel() == x.numel() and grad.dtype == x.dtype
    n = x.numel()
    out = torch.empty_like(x)
    backward_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](grad, x, out, n)
    return out
