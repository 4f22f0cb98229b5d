"""The public function, and its gradient."""

import torch

from .kernels import ${operator}_backward, ${operator}_forward


def ${operator}(x: torch.Tensor) -> torch.Tensor:
    """${returns}

    Args:
        x: float32, float16 or bfloat16, of any shape and strides. It gets a gradient.
    """
    x = x.contiguous()
    return _Forward.apply(x) if torch.is_grad_enabled() and x.requires_grad else ${operator}_forward(x)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return ${operator}_forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ${operator}_backward(grad.contiguous(), *ctx.saved_tensors)
