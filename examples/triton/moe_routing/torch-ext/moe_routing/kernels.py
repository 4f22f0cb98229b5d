"""Routing of tokens to experts: the softmax of the largest logits, and the number of tokens of each expert."""

import torch
import triton
import triton.language as tl


@triton.jit
def routing_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    counts_ptr,
    tokens,
    experts,
    top_k,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    expert = tl.arange(0, EXPERTS)
    rank = tl.arange(0, TOP_K)
    ptrs = logits_ptr + token.to(tl.int64)[:, None] * experts + expert[None, :]
    logits = tl.load(ptrs, mask=inside[:, None] & (expert < experts)[None, :], other=-float("inf")).to(tl.float32)
    chosen_logits = tl.full((BLOCK, TOP_K), -float("inf"), dtype=tl.float32)
    chosen = tl.zeros((BLOCK, TOP_K), dtype=tl.int32)
    for k in range(top_k):
        largest, index = tl.max(logits, axis=1, return_indices=True)
        chosen_logits = tl.where(rank[None, :] == k, largest[:, None], chosen_logits)
        chosen = tl.where(rank[None, :] == k, index[:, None], chosen)
        logits = tl.where(expert[None, :] == index[:, None], -float("inf"), logits)
    exponentials = tl.exp(chosen_logits - tl.max(chosen_logits, axis=1)[:, None])
    weights = exponentials / tl.sum(exponentials, axis=1)[:, None]
    offsets = token.to(tl.int64)[:, None] * top_k + rank[None, :]
    mask = inside[:, None] & (rank < top_k)[None, :]
    tl.store(weights_ptr + offsets, weights, mask=mask)
    tl.store(experts_ptr + offsets, chosen, mask=mask)
    tl.atomic_add(counts_ptr + chosen, 1, mask=mask)


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights of the `top_k` experts of each token, their numbers, and the tokens of each expert.

    Experts with equal logits are chosen in any order.
    """
    assert logits.dim() == 2 and logits.is_contiguous()
    assert 1 <= top_k <= 8 and top_k <= logits.shape[1]
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    counts = torch.zeros(experts, dtype=torch.int32, device=logits.device)
    routing_kernel[lambda meta: (triton.cdiv(tokens, meta["BLOCK"]),)](
        logits,
        weights,
        chosen,
        counts,
        tokens,
        experts,
        top_k,
        EXPERTS=64 if experts <= 64 else 256,
        TOP_K=8,
        BLOCK=16,
        num_warps=4,
    )
    return weights, chosen, counts
