"""The public functions, and the fakes and gradients of their ops."""

from typing import Optional

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.graph import increment_version

from ._ops import add_op_namespace_prefix, ops
from .derivatives import FORWARD_AD, LEVEL, gradients, raise_unless_transformed, refuse_negated, transform_with
from .devices import refuse_cpu


def rms_norm(
    x: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6, offset: float = 0.0, rounding: str = "last"
) -> Tensor:
    """Return `x / sqrt(mean(x ** 2) + eps) * (offset + weight)` over the last dimension of `x`, contiguous.

    The formula is that of Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). The arithmetic is
    float32. Models round at different steps; `rounding` chooses which.

    Args:
        x: float32, float16 or bfloat16, of any shape. The elements of a row must be adjacent to be read in place; the
            other dimensions may have any strides.
        weight: `[x.shape[-1]]`, of the dtype of `x` or float32. None: no weight and no offset.
        eps: Added to the mean of the squares.
        offset: Added to the weight, in float32: 1 for Gemma.
        rounding: `"last"` rounds the result to the dtype of `x`, and nothing before it (Gemma, Olmo 2,
            `torch.nn.RMSNorm`). `"before_weight"` rounds the normalized `x` to its dtype, and the product with the
            weight to the dtype to which Torch promotes both: that of `x`, or float32 for a float32 weight (Llama,
            Qwen, Mistral).

    `x` and `weight` get gradients, which ignore the roundings.

    Raises:
        TypeError: If an argument has a wrong type; the message names it.
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If `rounding` has another value.
    """
    options = (eps,) if rounding == "last" and offset == 0.0 else _options(eps, offset, rounding)
    try:
        if FORWARD_AD[LEVEL] < 0:
            if is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
                return _RMSNorm.apply(x, weight, options)
            return _rms_norm(x, weight, *options)
    except Exception as error:
        raise_unless_transformed(error, rms_norm, locals())
    return _rms_norm_formula(x, weight, *options)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    rounding: str = "last",
) -> tuple[Tensor, Tensor]:
    """Return `(rms_norm(x + residual, weight, eps, offset, rounding), x + residual)`, both contiguous.

    The sum is rounded to the dtype of `x` before it is normalized, as in two separate steps.

    Args:
        x: As in `rms_norm`.
        residual: Of the shape and dtype of `x`.
        weight, eps, offset, rounding: As in `rms_norm`.

    Raises:
        TypeError, RuntimeError, ValueError: As `rms_norm`.
    """
    options = (eps,) if rounding == "last" and offset == 0.0 else _options(eps, offset, rounding)
    try:
        if FORWARD_AD[LEVEL] < 0:
            if is_grad_enabled() and (
                x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
            ):
                return _AddRMSNorm.apply(x, residual, weight, options)
            return _add_rms_norm(x, residual, weight, *options)
    except Exception as error:
        raise_unless_transformed(error, add_rms_norm, locals())
    return _add_rms_norm_formula(x, residual, weight, *options)


def add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    rounding: str = "last",
) -> None:
    """Write the results of `add_rms_norm` over its arguments: the norm over `x`, and the sum over `residual`.

    Allocates nothing. `x` and `residual` may be strided as in `rms_norm`, but must not overlap. There is no gradient.

    Args:
        x, residual, weight, eps, offset, rounding: As in `add_rms_norm`. With `rounding="before_weight"` the weight
            must have the dtype of `x`, because the result has it.

    Raises:
        TypeError, RuntimeError, ValueError: As `rms_norm`; RuntimeError also if an argument cannot be written in place.
        NotImplementedError: If an argument needs a gradient.
    """
    options = (eps,) if rounding == "last" and offset == 0.0 else _options(eps, offset, rounding)
    try:
        if is_grad_enabled() and (
            x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
        ):
            raise NotImplementedError(
                "rmsnorm: add_rms_norm_ has no gradient, because it overwrites the tensors that a gradient needs"
            )
        if FORWARD_AD[LEVEL] < 0:
            _add_rms_norm_(x, residual, weight, *options)
            # The dispatcher does not do this for an op that autograd does not know.
            increment_version((x, residual))
            return
    except Exception as error:
        raise_unless_transformed(error, add_rms_norm_, locals())
        raise
    _add_rms_norm_in_place_formula(x, residual, weight, *options)


def _options(eps, offset, rounding):
    """Return the ops' arguments eps, offset and rounded_before_weight, without the last if it has its default value."""
    if rounding == "last":
        return eps, offset
    if rounding != "before_weight":
        raise ValueError(f'rmsnorm: rounding must be "last" or "before_weight", not {rounding!r}')
    return eps, offset, True


_rms_norm = ops.rms_norm.default
_add_rms_norm = ops.add_rms_norm.default
_add_rms_norm_ = ops.add_rms_norm_.default
_rms_norm_backward = ops.rms_norm_backward.default


# --- gradients -------------------------------------------------------------------------------------------------------


class _RMSNorm(torch.autograd.Function):
    # The options go as a tuple: each argument of `apply` costs the host time, forward and backward.
    @staticmethod
    def forward(ctx, x, weight, options):
        ctx.save_for_backward(x, weight)
        ctx.options = options
        return _rms_norm(x, weight, *options)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return *_gradients(ctx, grad, x, weight, None, ctx.needs_input_grad[1]), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, options):
        normed, total = _add_rms_norm(x, residual, weight, *options)
        ctx.save_for_backward(total, weight)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx, grad, grad_sum):
        if grad is None:
            return grad_sum, grad_sum, None, None
        total, weight = ctx.saved_tensors
        grad_total, grad_weight = _gradients(ctx, grad, total, weight, grad_sum, ctx.needs_input_grad[2])
        return grad_total, grad_total, grad_weight, None


def _gradients(ctx, grad, x, weight, grad_sum, weight_grad):
    if is_grad_enabled():  # in a backward pass only with `create_graph=True`
        grad_x, grad_weight = gradients(_rms_norm_formula, (x, weight), ctx.options, (grad,))
        return grad_x if grad_sum is None else grad_x + grad_sum, grad_weight
    options = ctx.options[:2]
    if grad.dtype == x.dtype:
        return _rms_norm_backward(grad, x, weight, grad_sum, weight_grad, *options)
    # `grad` is float32, because the weight is.
    grad_sum = None if grad_sum is None else grad_sum.float()
    grad_x, grad_weight = _rms_norm_backward(grad, x.float(), weight, grad_sum, weight_grad, *options)
    return grad_x.to(x.dtype), grad_weight


# --- fakes: shapes and dtypes of results; the binding checks the arguments ------------------------------------------


def _dtype_of_norm(x: Tensor, weight: Optional[Tensor], before_weight: bool) -> torch.dtype:
    return weight.dtype if before_weight and weight is not None else x.dtype


@torch.library.register_fake(add_op_namespace_prefix("rms_norm"))
def _rms_norm_fake(x, weight, eps, offset=0.0, rounded_before_weight=False):
    return x.new_empty(x.shape, dtype=_dtype_of_norm(x, weight, rounded_before_weight))


@torch.library.register_fake(add_op_namespace_prefix("add_rms_norm"))
def _add_rms_norm_fake(x, residual, weight, eps, offset=0.0, rounded_before_weight=False):
    return x.new_empty(x.shape, dtype=_dtype_of_norm(x, weight, rounded_before_weight)), x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("add_rms_norm_"))
def _add_rms_norm_in_place_fake(x, residual, weight, eps, offset=0.0, rounded_before_weight=False):
    pass


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_backward"))
def _rms_norm_backward_fake(grad, x, weight, grad_sum, weight_grad, eps, offset=0.0):
    return x.new_empty(x.shape), weight.new_empty(x.shape[-1]) if weight_grad else None


# --- formulas --------------------------------------------------------------------------------------------------------


def _rms_norm_formula(x, weight, eps, offset=0.0, rounded_before_weight=False):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if rounded_before_weight:
        normed = normed.to(x.dtype)
    return ((offset + weight.float()) * normed).to(_dtype_of_norm(x, weight, rounded_before_weight))


def _add_rms_norm_formula(x, residual, weight, *options):
    total = x + residual
    return _rms_norm_formula(total, weight, *options), total


def _add_rms_norm_in_place_formula(x, residual, weight, *options):
    normed, total = _add_rms_norm_formula(x, residual, weight, *options)
    x.copy_(normed)
    residual.copy_(total)


transform_with("rms_norm", _rms_norm_formula)
transform_with("add_rms_norm", _add_rms_norm_formula)
transform_with("add_rms_norm_", _add_rms_norm_in_place_formula)
refuse_negated("add_rms_norm_")

refuse_cpu("rms_norm", "add_rms_norm", "add_rms_norm_", "rms_norm_backward")
