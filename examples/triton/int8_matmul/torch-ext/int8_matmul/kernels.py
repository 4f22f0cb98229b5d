"""A linear layer with int8 weights, which have one scale for each output feature."""

import torch
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    m,
    n,
    k,
    stride_x,
    stride_weight,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that run at the same time share rows of x and of the weight: GROUP blocks of rows by a block of columns.
    program = tl.program_id(0)
    blocks_m = tl.cdiv(m, BLOCK_M)
    blocks_n = tl.cdiv(n, BLOCK_N)
    first = program // (GROUP * blocks_n) * GROUP
    group = tl.minimum(blocks_m - first, GROUP)
    block_m = first + program % (GROUP * blocks_n) % group
    block_n = program % (GROUP * blocks_n) // group

    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (rows % m).to(tl.int64)[:, None] * stride_x + inner[None, :]
    weight_ptrs = weight_ptr + (columns % n).to(tl.int64)[None, :] * stride_weight + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        x = tl.load(x_ptrs, mask=inner[None, :] < k - start, other=0.0)
        weight = tl.load(weight_ptrs, mask=inner[:, None] < k - start, other=0)
        total = tl.dot(x, weight.to(x.dtype), total)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    out = total * tl.load(scale_ptr + columns, mask=columns < n, other=0.0)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_ptrs, out, mask=(rows[:, None] < m) & (columns[None, :] < n))


def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return `x @ (weight * scale[:, None]).T` for `x` of m by k, int8 `weight` of n by k, and n scales in float32."""
    assert x.dim() == 2 and x.stride(1) == 1
    assert weight.dim() == 2 and weight.stride(1) == 1
    assert weight.shape[1] == x.shape[1] and scale.shape[0] == weight.shape[0]
    assert scale.is_contiguous()
    m, k = x.shape
    n = weight.shape[0]
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    BLOCK_M = 16 if m <= 16 else 128
    BLOCK_N = 64 if m <= 16 else 128

    def grid(meta):
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    matmul_kernel[grid](
        x,
        weight,
        scale,
        out,
        m,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=64,
        GROUP=8,
        num_warps=4 if m <= 16 else 8,
        num_stages=3,
    )
    return out
