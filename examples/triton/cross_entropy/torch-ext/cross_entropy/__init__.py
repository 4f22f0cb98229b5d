"""Cross entropy with its gradient."""

import torch

from .kernels import cross_entropy_backward, cross_entropy_forward


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, ignore_index):
        loss, lse = cross_entropy_forward(logits, target, ignore_index)
        ctx.save_for_backward(logits, target, lse)
        ctx.ignore_index = ignore_index
        return loss

    @staticmethod
    def backward(ctx, grad):
        logits, target, lse = ctx.saved_tensors
        return cross_entropy_backward(grad.contiguous(), logits, target, lse, ctx.ignore_index), None, None


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return the cross entropy of each row of `logits`, in float32."""
    return _CrossEntropy.apply(logits, target, ignore_index)


__all__ = ["cross_entropy", "cross_entropy_backward", "cross_entropy_forward"]
