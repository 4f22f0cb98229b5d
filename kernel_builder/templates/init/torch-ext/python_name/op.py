"""The public function, and the gradient and fakes of its ops."""

import torch
from torch.autograd.forward_ad import unpack_dual

from ._ops import add_op_namespace_prefix, ops


def ${operator}(x: torch.Tensor) -> torch.Tensor:
    """${returns}

    Args:
        x: float32, float16 or bfloat16, of any shape and strides. It gets a gradient.

    Raises:
        RuntimeError: If `x` has another dtype.
    """
    if unpack_dual(x).tangent is not None:  # the op would lose the tangent of forward mode
        return _formula(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Forward.apply(x)
    return _forward(x)


_forward = ops.${operator}.default
_backward = ops.${operator}_backward.default


def _formula(x):
    return ${formula}


# Transforms of `torch.func` compute the formula in place of the op.
torch.library.impl(add_op_namespace_prefix("${operator}"), "FuncTorchDynamicLayerFrontMode")(_formula)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = _forward(x)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, grad):
        # Grad mode is on in a backward pass only with `create_graph=True`.
        op = _Backward.apply if torch.is_grad_enabled() else _backward
        return op(grad, *ctx.saved_tensors)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad, x):
        return _backward(grad, x)

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("${name}: the gradient of ${operator} cannot be differentiated a second time")


@torch.library.register_fake(add_op_namespace_prefix("${operator}"))
def _forward_fake(x):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("${operator}_backward"))
def _backward_fake(grad, x):
    return x.new_empty(x.shape)
