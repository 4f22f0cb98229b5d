"""The operators as functions, and what Torch must know about them to trace and differentiate them."""

from typing import Optional

import torch

from ._dispatch import below_autograd, differentiable, differentiable_once
from ._ops import add_op_namespace_prefix, ops


def rms_norm(x: torch.Tensor, weight: Optional[torch.Tensor] = None, eps: float = 1e-6) -> torch.Tensor:
    """Returns `x / sqrt(mean(x ** 2) + eps) * weight`, over the last dimension of `x`, contiguous.

    Args:
        x: float32, float16 or bfloat16, of any shape. Only the elements of a row need to be adjacent: other strides
            are read as they are.
        weight: One factor for each element of a row, of the dtype of `x` or float32. None: no factor.
        eps: Added to the mean of the squares.

    The arithmetic is float32, and the result is rounded to the dtype of `x` once.

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
    """
    return _rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: Optional[torch.Tensor] = None, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `(rms_norm(x + residual, weight, eps), x + residual)`, both contiguous.

    The sum is rounded to the dtype of `x` before it is normalized, as if the two steps were taken one by one.

    Args:
        x: As in `rms_norm`.
        residual: Of the shape and dtype of `x`.
        weight: As in `rms_norm`.
        eps: As in `rms_norm`.

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
    """
    return _add_rms_norm(x, residual, weight, eps)


def _check(x: torch.Tensor, weight: Optional[torch.Tensor], residual: Optional[torch.Tensor]) -> None:
    types = (torch.float32, torch.float16, torch.bfloat16)
    torch._check(x.dtype in types, lambda: "rmsnorm: x must be float32, float16 or bfloat16")
    torch._check(x.dim() > 0, lambda: "rmsnorm: x must have at least one dimension")
    if weight is not None:
        torch._check(weight.device == x.device, lambda: "rmsnorm: weight must be on the device of x")
        torch._check(
            weight.dim() == 1 and weight.shape[0] == x.shape[-1],
            lambda: f"rmsnorm: weight must have shape {[x.shape[-1]]}, not {list(weight.shape)}",
        )
        torch._check(
            weight.dtype in (x.dtype, torch.float32), lambda: "rmsnorm: weight must have the dtype of x, or float32"
        )
    if residual is not None:
        torch._check(residual.device == x.device, lambda: "rmsnorm: residual must be on the device of x")
        torch._check(residual.dtype == x.dtype, lambda: "rmsnorm: residual must have the dtype of x")
        torch._check(
            residual.shape == x.shape,
            lambda: f"rmsnorm: residual must have shape {list(x.shape)}, not {list(residual.shape)}",
        )


@torch.library.register_fake(add_op_namespace_prefix("rms_norm"))
def _rms_norm_fake(x, weight, eps):
    _check(x, weight, None)
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("add_rms_norm"))
def _add_rms_norm_fake(x, residual, weight, eps):
    _check(x, weight, residual)
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_backward"))
def _rms_norm_backward_fake(grad, x, weight, grad_sum, eps, weight_grad):
    return x.new_empty(x.shape), (x if weight is None else weight).new_empty(x.shape[-1] if weight_grad else 0)


# What `torch.library.register_autograd` would do, at less than half of its cost for each call.


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        with below_autograd():
            return ops.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        grad_x, grad_weight = _rms_norm_backward(grad, x, weight, None, ctx.eps, wanted)
        return grad_x, grad_weight if wanted else None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        with below_autograd():
            normed, total = ops.add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx, grad, grad_sum):
        if grad is None:
            return grad_sum, grad_sum, None, None
        total, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2]
        grad_total, grad_weight = _rms_norm_backward(grad, total, weight, grad_sum, ctx.eps, wanted)
        return grad_total, grad_total, grad_weight if wanted else None, None


_rms_norm = differentiable("rms_norm", _RMSNorm)
_add_rms_norm = differentiable("add_rms_norm", _AddRMSNorm)
_rms_norm_backward = differentiable_once(
    "rms_norm_backward", "rmsnorm: its gradient cannot be differentiated a second time"
)
