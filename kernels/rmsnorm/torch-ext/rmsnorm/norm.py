"""The operators as functions, and what Torch must know about them to trace and differentiate them."""

from typing import Optional

import torch
from torch import Tensor

from ._dispatch import changing, differentiable, differentiable_once
from ._ops import add_op_namespace_prefix


def rms_norm(
    x: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6, offset: float = 0.0, rounding: str = "last"
) -> Tensor:
    """Returns `x / sqrt(mean(x ** 2) + eps) * (offset + weight)`, over the last dimension of `x`, contiguous.

    The formula is that of Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). The arithmetic is
    float32, and models differ in the roundings, which `rounding` chooses.

    Args:
        x: float32, float16 or bfloat16, of any shape. Only the elements of a row need to be adjacent: other strides
            are read as they are.
        weight: One factor for each element of a row, of the dtype of `x` or float32. None: no factor, and no offset.
        eps: Added to the mean of the squares.
        offset: Added to the weight, in float32: 1 for Gemma.
        rounding: `"last"`: the result is rounded to the dtype of `x`, and nothing before it (Gemma, Olmo 2,
            `torch.nn.RMSNorm`). `"before_weight"`: the quotient is rounded to the dtype of `x`, and its product with
            the weight to the dtype to which Torch promotes both: that of `x`, or float32 when the weight is float32
            (Llama, Qwen, Mistral).

    Differentiable in `x` and `weight`, as if nothing were rounded.

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If there is no such `rounding`.
    """
    return _rms_norm(x, weight, eps, offset, rounding != "last" and _is_before_weight(rounding))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    rounding: str = "last",
) -> tuple[Tensor, Tensor]:
    """Returns `(rms_norm(x + residual, weight, eps, offset, rounding), x + residual)`, both contiguous.

    The sum is rounded to the dtype of `x` before it is normalized, as if the two steps were taken one by one.

    Args:
        x: As in `rms_norm`.
        residual: Of the shape and dtype of `x`.
        weight, eps, offset, rounding: As in `rms_norm`.

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If there is no such `rounding`.
    """
    return _add_rms_norm(x, residual, weight, eps, offset, rounding != "last" and _is_before_weight(rounding))


def add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    rounding: str = "last",
) -> None:
    """Writes what `add_rms_norm` returns over its arguments: the norm over `x`, and the sum over `residual`.

    Allocates nothing. The two may be strided as in `rms_norm`, but must not overlap. Has no gradient.

    Args:
        x, residual, weight, eps, offset, rounding: As in `add_rms_norm`. With `rounding="before_weight"` the weight has
            the dtype of `x`, since the result does.

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device, or cannot be written where it is; the message
            names it.
        NotImplementedError: If an argument needs a gradient.
        ValueError: If there is no such `rounding`.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
    ):
        raise NotImplementedError("rmsnorm: add_rms_norm_ has no gradient, because it changes what that would need")
    _add_rms_norm_(x, residual, weight, eps, offset, rounding != "last" and _is_before_weight(rounding))


def _is_before_weight(rounding: str) -> bool:
    if rounding not in ("last", "before_weight"):
        raise ValueError(f'rmsnorm: rounding must be "last" or "before_weight", not {rounding!r}')
    return rounding == "before_weight"


def _check(x: Tensor, weight: Optional[Tensor], residual: Optional[Tensor]) -> None:
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


def _dtype_of_norm(x: Tensor, weight: Optional[Tensor], rounded_before_weight: bool) -> torch.dtype:
    return weight.dtype if rounded_before_weight and weight is not None else x.dtype


@torch.library.register_fake(add_op_namespace_prefix("rms_norm"))
def _rms_norm_fake(x, weight, eps, offset, rounded_before_weight):
    _check(x, weight, None)
    return x.new_empty(x.shape, dtype=_dtype_of_norm(x, weight, rounded_before_weight))


@torch.library.register_fake(add_op_namespace_prefix("add_rms_norm"))
def _add_rms_norm_fake(x, residual, weight, eps, offset, rounded_before_weight):
    _check(x, weight, residual)
    return x.new_empty(x.shape, dtype=_dtype_of_norm(x, weight, rounded_before_weight)), x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("add_rms_norm_"))
def _add_rms_norm_in_place_fake(x, residual, weight, eps, offset, rounded_before_weight):
    _check(x, weight, residual)
    torch._check(
        _dtype_of_norm(x, weight, rounded_before_weight) == x.dtype,
        lambda: "rmsnorm: weight must have the dtype of x, to be multiplied after the rounding in place",
    )


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_backward"))
def _rms_norm_backward_fake(grad, x, weight, grad_sum, eps, offset, weight_grad):
    return x.new_empty(x.shape), (x if weight is None else weight).new_empty(x.shape[-1] if weight_grad else 0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, rounded_before_weight):
        ctx.save_for_backward(x, weight)
        ctx.options = eps, offset
        return _raw_rms_norm(x, weight, eps, offset, rounded_before_weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = _gradients(ctx, grad, x, weight, None, ctx.needs_input_grad[1])
        return grad_x, grad_weight, None, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, rounded_before_weight):
        normed, total = _raw_add_rms_norm(x, residual, weight, eps, offset, rounded_before_weight)
        ctx.save_for_backward(total, weight)
        ctx.options = eps, offset
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx, grad, grad_sum):
        if grad is None:
            return grad_sum, grad_sum, None, None, None, None
        total, weight = ctx.saved_tensors
        grad_total, grad_weight = _gradients(ctx, grad, total, weight, grad_sum, ctx.needs_input_grad[2])
        return grad_total, grad_total, grad_weight, None, None, None


def _gradients(ctx, grad, x, weight, grad_sum, weight_grad):
    eps, offset = ctx.options
    if grad.dtype != x.dtype:  # float32, from a product with a float32 weight
        grad_sum = None if grad_sum is None else grad_sum.float()
        grad_x, grad_weight = _rms_norm_backward(grad, x.float(), weight, grad_sum, eps, offset, weight_grad)
        grad_x = grad_x.to(x.dtype)
    else:
        grad_x, grad_weight = _rms_norm_backward(grad, x, weight, grad_sum, eps, offset, weight_grad)
    return grad_x, grad_weight if weight_grad else None


_raw_rms_norm = differentiable("rms_norm")
_raw_add_rms_norm = differentiable("add_rms_norm")
_rms_norm = differentiable("rms_norm", _RMSNorm, 2)
_add_rms_norm = differentiable("add_rms_norm", _AddRMSNorm, 3)
_add_rms_norm_ = changing("add_rms_norm_", 2)
_rms_norm_backward = differentiable_once(
    "rms_norm_backward", "rmsnorm: its gradient cannot be differentiated a second time"
)
