"""Cross entropy over a vocabulary of any size: a program reads a row of logits in blocks."""

import torch
import triton
import triton.language as tl


@triton.jit
def forward_kernel(logits_ptr, target_ptr, loss_ptr, lse_ptr, stride, n, ignore_index, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    largest = -float("inf")
    total = 0.0
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + columns, mask=columns < n, other=-float("inf")).to(tl.float32)
        largest_so_far = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - largest_so_far) + tl.sum(tl.exp(x - largest_so_far), axis=0)
        largest = largest_so_far
    lse = largest + tl.log(total)
    target = tl.load(target_ptr + row)
    counted = target != ignore_index
    logit = tl.load(logits_ptr + target, mask=counted, other=0.0).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, tl.where(counted, lse - logit, 0.0))


@triton.jit
def backward_kernel(
    grad_ptr, logits_ptr, target_ptr, lse_ptr, out_ptr, stride, out_stride, n, ignore_index, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < n
    target = tl.load(target_ptr + row)
    grad = tl.where(target != ignore_index, tl.load(grad_ptr + row), 0.0)
    x = tl.load(logits_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    softmax = tl.exp(x - tl.load(lse_ptr + row))
    tl.store(out_ptr + row * out_stride + columns, grad * (softmax - (columns == target)), mask=mask)


def cross_entropy_forward(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of the rows of `logits`, and the logarithms of the sums of their exponentials."""
    assert logits.dim() == 2 and logits.stride(1) == 1
    assert target.is_contiguous() and target.shape[0] == logits.shape[0]
    rows, n = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    forward_kernel[(rows,)](
        logits, target, loss, lse, logits.stride(0), n, ignore_index, BLOCK=8192 if n > 4096 else 1024, num_warps=8
    )
    return loss, lse


def cross_entropy_backward(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """Return the gradient of `logits`, from the gradients of the losses."""
    assert grad.is_contiguous() and target.is_contiguous() and lse.is_contiguous()
    assert logits.dim() == 2 and logits.stride(1) == 1
    rows, n = logits.shape
    out = torch.empty((rows, n), dtype=logits.dtype, device=logits.device)
    backward_kernel[lambda meta: (rows, triton.cdiv(n, meta["BLOCK"]))](
        grad, logits, target, lse, out, logits.stride(0), out.stride(0), n, ignore_index, BLOCK=4096, num_warps=8
    )
    return out
