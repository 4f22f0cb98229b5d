"""The public function, and the gradient and fakes of its ops."""

import torch
from torch.autograd.forward_ad import unpack_dual

from ._ops import add_op_namespace_prefix, ops


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax of the last dimension of `x`, as a contiguous tensor.

    Args:
        x: float32, float16 or bfloat16, of any shape and strides. It gets a gradient.

    The arithmetic is float32, and the result is rounded to the dtype of `x` once.

    Raises:
        RuntimeError: If `x` has another dtype.
    """
    if unpack_dual(x).tangent is not None:  # the op would lose the tangent of forward mode
        return _formula(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Forward.apply(x)
    return _forward(x)


_forward = ops.softmax.default
_backward = ops.softmax_backward.default


def _formula(x):
    return torch.softmax(x, -1)


# Transforms of `torch.func` compute the formula in place of the op.
torch.library.impl(add_op_namespace_prefix("softmax"), "FuncTorchDynamicLayerFrontMode")(_formula)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = _forward(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        # Grad mode is on in a backward pass only with `create_graph=True`.
        op = _Backward.apply if torch.is_grad_enabled() else _backward
        return op(grad, *ctx.saved_tensors)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad, y):
        return _backward(grad, y)

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("softmax: the gradient of softmax cannot be differentiated a second time")


@torch.library.register_fake(add_op_namespace_prefix("softmax"))
def _forward_fake(x):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("softmax_backward"))
def _backward_fake(grad, y):
    return y.new_empty(y.shape)
