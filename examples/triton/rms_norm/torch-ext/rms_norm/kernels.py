"""RMSNorm, forward and backward. A row fits into one block."""

import torch
import triton
import triton.language as tl


@triton.jit
def forward_kernel(x_ptr, weight_ptr, out_ptr, rstd_ptr, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < n
    x = tl.load(x_ptr + row * n + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(out_ptr + row * n + columns, x * rstd * weight, mask=mask)


@triton.jit
def backward_kernel(
    grad_ptr, x_ptr, weight_ptr, rstd_ptr, grad_x_ptr, partial_ptr, rows, n, rows_per_program, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < n
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], dtype=tl.float32)
    first = program * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, rows)):
        offsets = row * n + columns
        normed = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * tl.load(rstd_ptr + row)
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        scaled = grad * weight
        mean = tl.sum(scaled * normed, axis=0) / n
        tl.store(grad_x_ptr + offsets, (scaled - normed * mean) * tl.load(rstd_ptr + row), mask=mask)
        grad_weight += grad * normed
    tl.store(partial_ptr + program * n + columns, grad_weight, mask=mask)


def rms_norm_forward(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalized rows of `x`, and the reciprocals of their root mean squares."""
    assert x.is_contiguous() and weight.is_contiguous()
    assert weight.shape[0] == x.shape[-1]
    n = x.shape[-1]
    rows = x.numel() // max(n, 1)
    out = torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    BLOCK = 1024 if n <= 1024 else 4096 if n <= 4096 else 8192
    forward_kernel[(rows,)](x, weight, out, rstd, n, eps, BLOCK=BLOCK, num_warps=8 if n > 1024 else 4)
    return out, rstd


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, rows_per_program: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of `x`, and parts of the gradient of `weight`, whose sum it is."""
    assert grad.is_contiguous() and x.is_contiguous()
    assert weight.is_contiguous() and rstd.is_contiguous()
    n = x.shape[-1]
    rows = rstd.shape[0]
    programs = triton.cdiv(rows, rows_per_program)
    grad_x = torch.empty_like(x)
    partial = torch.empty((programs, n), dtype=torch.float32, device=x.device)
    backward_kernel[(programs,)](
        grad,
        x,
        weight,
        rstd,
        grad_x,
        partial,
        rows,
        n,
        rows_per_program,
        BLOCK=1024 if n <= 1024 else 4096 if n <= 4096 else 8192,
        num_warps=8 if n > 1024 else 4,
    )
    return grad_x, partial
