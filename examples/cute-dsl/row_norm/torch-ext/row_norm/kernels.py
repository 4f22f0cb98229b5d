"""RMSNorm of rows, and a scaled sum, in CuTe DSL."""

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def add_scaled_kernel(
    x: cute.Tensor,
    y: cute.Tensor,
    out: cute.Tensor,
    n: cutlass.Int32,
    factor: cutlass.Float32,
    VECTOR: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    threads, _, _ = cute.arch.block_dim()
    at = block * threads + thread
    if (at + 1) * VECTOR <= n:
        # One load of 16 bytes.
        part_x = cute.local_tile(x, (VECTOR,), (at,))
        part_y = cute.local_tile(y, (VECTOR,), (at,))
        part_out = cute.local_tile(out, (VECTOR,), (at,))
        total = part_x.load().to(cutlass.Float32) + part_y.load().to(cutlass.Float32) * factor
        part_out.store(total.to(out.element_type))
    else:
        for position in range(at * VECTOR, n):
            total = x[position].to(cutlass.Float32) + y[position].to(cutlass.Float32) * factor
            out[position] = total.to(out.element_type)


@cute.jit
def add_scaled_jit(
    x: cute.Tensor,
    y: cute.Tensor,
    out: cute.Tensor,
    factor: cutlass.Float32,
    THREADS: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    n = cute.size(x)
    vector = 128 // x.element_type.width
    blocks = cute.ceil_div(n, THREADS * vector)
    add_scaled_kernel(x, y, out, n, factor, vector).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.kernel
def rms_norm_kernel(
    x: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
    rstd: cute.Tensor,
    eps: cutlass.Float32,
    THREADS: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    columns = x.shape[1]
    warps = THREADS // 32
    shared = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps))

    total = cutlass.Float32(0.0)
    for column in range(thread, columns, THREADS):
        value = x[row, column].to(cutlass.Float32)
        total += value * value
    total = cute.arch.warp_reduction(total, lambda a, b: a + b)
    if thread % 32 == 0:
        shared[thread // 32] = total
    cute.arch.sync_threads()
    total = cutlass.Float32(0.0)
    for warp in cutlass.range_constexpr(warps):
        total += shared[warp]
    scale = cute.math.rsqrt(total / columns + eps)
    if thread == 0:
        rstd[row] = scale
    for column in range(thread, columns, THREADS):
        value = x[row, column].to(cutlass.Float32) * scale * weight[column].to(cutlass.Float32)
        out[row, column] = value.to(out.element_type)


@cute.jit
def rms_norm_jit(
    x: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
    rstd: cute.Tensor,
    eps: cutlass.Float32,
    THREADS: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    rms_norm_kernel(x, weight, out, rstd, eps, THREADS).launch(
        grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream
    )


def add_scaled(x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return `x + factor * y` of vectors."""
    out = torch.empty_like(x)
    stream = cuda.CUstream(torch.cuda.current_stream(x.device).cuda_stream)
    tensors = [from_dlpack(each, assumed_align=16).mark_layout_dynamic() for each in (x, y, out)]
    cute.compile(add_scaled_jit, *tensors, factor, 128, stream)(*tensors, factor, stream)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x / sqrt(mean(x**2) + eps) * weight` over the last dimension, and the factors of rows."""
    out = torch.empty_like(x)
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    stream = cuda.CUstream(torch.cuda.current_stream(x.device).cuda_stream)
    tensors = [from_dlpack(each) for each in (x, weight, out, rstd)]
    cute.compile(rms_norm_jit, *tensors, eps, 128, stream)(*tensors, eps, stream)
    return out, rstd
