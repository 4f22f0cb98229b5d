"""Flash attention, forward: BLOCK_M queries of a head in a program, with a running softmax over blocks of keys."""

import torch
import triton
import triton.language as tl


@triton.jit
def _attend(
    total,
    denominator,
    largest,
    q,
    k_ptrs,
    v_ptrs,
    rows,
    columns,
    n,
    shift,
    scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Add a block of keys to a block of queries."""
    inside = columns < n
    k = tl.load(k_ptrs, mask=inside[None, :], other=0.0)
    scores = tl.dot(q, k) * scale
    if MASKED:
        kept = inside[None, :]
        if CAUSAL:
            kept = kept & (rows[:, None] + shift >= columns[None, :])
        scores = tl.where(kept, scores, -1.0e30)
    largest_so_far = tl.maximum(largest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - largest_so_far[:, None])
    kept_share = tl.exp2(largest - largest_so_far)
    v = tl.load(v_ptrs, mask=inside[:, None], other=0.0)
    total = tl.dot(weights.to(v.dtype), v, total * kept_share[:, None])
    return total, denominator * kept_share + tl.sum(weights, axis=1), largest_so_far


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    out_batch,
    out_head,
    out_row,
    heads,
    queries_per_key,
    m,
    n,
    scale,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    channels = tl.arange(0, HEAD_DIM)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + head // queries_per_key * k_head
    v_ptr += batch * v_batch + head // queries_per_key * v_head
    out_ptr += batch * out_batch + head * out_head

    q = tl.load(q_ptr + rows[:, None] * q_row + channels[None, :], mask=rows[:, None] < m, other=0.0)
    k_ptrs = k_ptr + columns[None, :] * k_row + channels[:, None]
    v_ptrs = v_ptr + columns[:, None] * v_row + channels[None, :]
    scale *= 1.4426950408889634  # log2(e): the softmax is computed by powers of 2
    total = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
    denominator = tl.zeros((BLOCK_M,), dtype=tl.float32)
    largest = tl.full((BLOCK_M,), -1.0e30, dtype=tl.float32)

    shift = n - m  # the last query sees all keys
    if CAUSAL:
        whole = tl.maximum(first + shift + 1, 0) // BLOCK_N * BLOCK_N  # keys before it need no mask
        end = tl.maximum(tl.minimum(first + BLOCK_M + shift, n), 0)
        whole = tl.minimum(whole, n // BLOCK_N * BLOCK_N)
    else:
        whole = n // BLOCK_N * BLOCK_N
        end = n
    for start in range(0, whole, BLOCK_N):
        total, denominator, largest = _attend(
            total, denominator, largest, q, k_ptrs, v_ptrs, rows, start + columns, n, shift, scale, False, CAUSAL
        )
        k_ptrs += BLOCK_N * k_row
        v_ptrs += BLOCK_N * v_row
    for start in range(whole, end, BLOCK_N):
        total, denominator, largest = _attend(
            total, denominator, largest, q, k_ptrs, v_ptrs, rows, start + columns, n, shift, scale, True, CAUSAL
        )
        k_ptrs += BLOCK_N * k_row
        v_ptrs += BLOCK_N * v_row

    inside = rows < m
    lse = (largest + tl.log2(denominator)) * 0.6931471805599453
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * m + rows, lse, mask=inside)
    out = total / denominator[:, None]
    tl.store(out_ptr + rows[:, None] * out_row + channels[None, :], out, mask=inside[:, None])


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of `q` over `k` and `v`, and the logarithms of the softmax's denominators.

    Queries are batch by heads by m by 64 or 128; keys and values are batch by key heads by n by as many. With `causal`,
    the last query sees all keys.
    """
    assert q.dim() == 4 and k.dim() == 4 and v.dim() == 4
    assert q.stride(3) == 1 and k.stride(3) == 1 and v.stride(3) == 1
    assert q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    assert k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]
    assert k.shape[2] == v.shape[2] and k.shape[3] == v.shape[3]
    assert q.shape[1] % k.shape[1] == 0
    batch, heads, m, head_dim = q.shape
    n = k.shape[2]
    out = torch.empty((batch, heads, m, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, m), dtype=torch.float32, device=q.device)
    attention_kernel[lambda meta: (triton.cdiv(m, meta["BLOCK_M"]), batch * heads)](
        q,
        k,
        v,
        out,
        lse,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        k.stride(0),
        k.stride(1),
        k.stride(2),
        v.stride(0),
        v.stride(1),
        v.stride(2),
        out.stride(0),
        out.stride(1),
        out.stride(2),
        heads,
        heads // k.shape[1],
        m,
        n,
        scale,
        HEAD_DIM=head_dim,
        CAUSAL=causal,
        BLOCK_M=128,
        BLOCK_N=64,
        num_warps=8 if head_dim == 128 else 4,
        num_stages=3 if head_dim == 64 else 2,
    )
    return out, lse
