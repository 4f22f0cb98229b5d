"""The public function, and the fake and the gradients of its op."""

import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from ._ops import add_op_namespace_prefix, ops
from .derivatives import FORWARD_AD, LEVEL, gradients, raise_unless_transformed, transform_with
from .devices import refuse_cpu

# The logits of a chunk take as much memory as the input or weight, and at least this: products of few rows are slow,
# and each chunk reads and writes the weight's gradient.
_LEAST_BYTES = 256 << 20


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Optional[Tensor] = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the cross entropy of `linear(input, linear_weight, linear_bias)` and `target`, a float32 number.

    Logits are computed in chunks of rows, and replaced by their gradients, from which those of the arguments follow at
    once. So the memory is that of the gradients and of one chunk, and the backward pass only multiplies.

    Args:
        input: float32, float16 or bfloat16, [..., in_features].
        linear_weight: [classes, in_features], of the dtype of `input`.
        target: int64, [...]: the class of each row. For a number that is neither a class nor `ignore_index`, the loss
            is NaN.
        linear_bias: [classes], of the dtype of `input`.
        reduction: `"mean"` over the rows that are not ignored, or `"sum"`.
        ignore_index: Rows with this target have neither loss nor gradient.
        label_smoothing: The share of the loss that is the mean over all classes, from 0 to 1.
        softcap: If positive, logits are replaced by `softcap * tanh(logits / softcap)`, as in Gemma 2.
        z_loss: The factor of the squared logarithm of the softmax's denominator, which is added to the loss
            (arXiv:2204.02311).

    Logits are rounded to the dtype of `input`; the rest is float32. `input`, `linear_weight` and `linear_bias` get
    gradients; those of several chunks are added up in the dtype of `linear_weight`. In float16 they are multiplied by a
    power of two until the backward pass, so that small ones do not underflow before a loss scale multiplies them.

    Raises:
        TypeError: If an argument has a wrong type; the message names it.
        ValueError: If `reduction` or `label_smoothing` has another value, or if shapes do not fit.
        RuntimeError: If a tensor has a wrong dtype or device.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"loss: reduction must be 'mean' or 'sum', not {reduction!r}")
    options = reduction, ignore_index, label_smoothing, softcap, z_loss
    try:
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"loss: label_smoothing must be from 0 to 1, not {label_smoothing}")
        _check_shapes(input, linear_weight, target, linear_bias)
        input, target = input.reshape(-1, input.shape[-1]), target.reshape(-1)
        device = input.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            input, linear_weight = input.to(dtype), linear_weight.to(dtype)
            linear_bias = None if linear_bias is None else linear_bias.to(dtype)
        tensors = input, linear_weight, linear_bias
        if FORWARD_AD[LEVEL] < 0:
            if is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
                return _LinearCrossEntropy.apply(*tensors, target, options)
            return _linear_cross_entropy(*tensors, target, *options, [False, False, False])[0]
    except ValueError:
        raise
    except Exception as error:
        raise_unless_transformed(error, linear_cross_entropy, locals())
    return _formula(input, linear_weight, linear_bias, target, options)


def _check_shapes(input, linear_weight, target, linear_bias):
    if linear_weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"loss: linear_weight must have shape [classes, {input.shape[-1] if input.dim() else 'in_features'}], the "
            f"last of input, not {[*linear_weight.shape]}"
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(f"loss: target must have shape {[*input.shape[:-1]]}, not {[*target.shape]}")
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise ValueError(f"loss: linear_bias must have shape {[linear_weight.shape[0]]}, not {[*linear_bias.shape]}")


# An op, so that torch.compile does not unroll the loop, and rows may be of any number.
@torch.library.custom_op(add_op_namespace_prefix("linear_cross_entropy"), mutates_args=())
def _linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    target: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, and the gradients of input, weight and bias; those that are not wanted have no elements.

    If any is wanted in float16, all are multiplied by a power of two, and the first result is the loss and this power.
    """
    scale = torch.ones((), dtype=torch.float32, device=input.device)
    if reduction == "mean":
        scale = scale / (target != ignore_index).sum()
    losses = torch.empty(len(input), dtype=torch.float32, device=input.device)
    of_input, of_weight, of_bias = _empty_gradients(input, weight, bias, wanted)
    if len(input) == 0:
        of_weight.zero_()
    sums = torch.zeros(of_bias.shape, dtype=torch.float32, device=input.device)
    step, scaled = _rows_of_chunk(input, weight), input.dtype == torch.float16 and any(wanted)
    power = _power(input, weight, bias, scale, reduction, softcap, z_loss, wanted) if scaled else None
    scale_of_grads = scale * power if scaled else scale
    for start in range(0, len(input), step):
        chunk, part = input[start : start + step], slice(start, start + step)
        logits = F.linear(chunk, weight, bias)
        options = ignore_index, label_smoothing, softcap, z_loss
        losses[part] = _cross_entropy_(logits, target[part], scale_of_grads, *options)
        if wanted[0]:
            torch.mm(logits, weight, out=of_input[part])
        if wanted[1]:
            of_weight.addmm_(logits.t(), chunk, beta=int(start > 0))
        if wanted[2]:
            sums += logits.sum(0, dtype=torch.float32)
    loss = losses.sum() * scale
    return torch.stack((loss, power)) if scaled else loss, of_input, of_weight, of_bias.copy_(sums)


def _power(input, weight, bias, scale, reduction, softcap, z_loss, wanted):
    """Return the power of two that brings gradients of float16 near the end of its range, but never past it.

    A gradient of a logit is at most `scale`. One of the weight sums its products with a column of `input`, and is at
    most sqrt(rows) times the norm of this column (Cauchy-Schwarz); one of the bias is at most the number of rows. The
    z-loss multiplies them by `1 + 2 * z_loss * lse`; lse is at most the largest logit plus log(classes).
    """
    rows, scale = len(input), scale.clamp(max=1)  # without a row it is infinite
    most = torch.ones_like(scale) if reduction == "mean" else scale * rows
    if wanted[1] and input.numel() > 0:
        norm = torch.linalg.vector_norm(input, dim=0, dtype=torch.float32).amax()
        most = torch.maximum(most, norm * (scale.sqrt() if reduction == "mean" else rows**0.5))
    limit = torch.maximum(most / 2**13, scale)
    if z_loss != 0 and input.numel() > 0:
        largest = torch.full_like(scale, softcap)
        if softcap <= 0:
            of_rows = (torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).amax() for x in (input, weight))
            largest = math.prod(of_rows) + (0 if bias is None else bias.abs().amax())
        limit = limit * (1 + 2 * abs(z_loss) * (largest + math.log(len(weight))))
    return 4 * torch.frexp(limit).mantissa / limit


def _empty_gradients(input, weight, bias, wanted):
    given = input, weight, input if bias is None else bias
    return [torch.empty_like(t) if want else t.new_empty(0) for t, want in zip(given, wanted)]


@_linear_cross_entropy.register_fake
def _linear_cross_entropy_fake(input, weight, bias, target, *options):
    scaled = input.dtype == torch.float16 and any(options[-1])
    loss = input.new_empty((2,) if scaled else (), dtype=torch.float32)
    return (loss, *_empty_gradients(input, weight, bias, options[-1]))


def _rows_of_chunk(rows, weight):
    least = max(_LEAST_BYTES, max(rows.numel(), weight.numel()) * rows.element_size())
    most = least // max(weight.shape[0] * rows.element_size(), 1)
    chunks = -(-len(rows) // max(most, 1))
    return max(-(-len(rows) // max(chunks, 1)), 1)


_cross_entropy_ = ops.cross_entropy_.default


@torch.library.register_fake(add_op_namespace_prefix("cross_entropy_"))
def _cross_entropy_fake(logits, target, scale, ignore_index, label_smoothing, softcap, z_loss):
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, target, options):
        ctx.wanted = list(ctx.needs_input_grad[:3])
        loss, *ctx.grads = _linear_cross_entropy(input, weight, bias, target, *options, ctx.wanted)
        ctx.power = None
        if loss.dim() > 0:
            loss, ctx.power = loss[0].clone(), loss[1]
        ctx.save_for_backward(input, weight, bias, target)
        ctx.options = options
        return loss

    @staticmethod
    def backward(ctx, grad):
        # Gradients are enabled in a backward pass with `create_graph=True` only. An earlier backward pass, with
        # `retain_graph=True`, has overwritten the gradients of the forward pass.
        if is_grad_enabled() or ctx.grads is None:
            *tensors, target = ctx.saved_tensors
            grads = gradients(lambda *given: _formula(*given, target, ctx.options), tensors, (), (grad,))
            return *grads, None, None
        if ctx.power is not None:
            grad = grad / ctx.power
        # On a GPU, a factor without dimensions would be rounded to the dtype of the gradients. On a CPU, one with a
        # dimension would make Torch copy them.
        factor = grad.reshape(1 if grad.is_cuda else ())
        grads, ctx.grads = ctx.grads, None
        try:
            results = [own.mul_(factor) if wanted else None for own, wanted in zip(grads, ctx.wanted)]
        except RuntimeError:  # a batch of gradients, whose products do not fit into those of the forward pass
            ctx.grads, factor = grads, grad.reshape(1)
            results = [(own * factor).to(own.dtype) if wanted else None for own, wanted in zip(grads, ctx.wanted)]
        return *results, None, None


def _formula(input, weight, bias, target, options):
    reduction, ignore_index, label_smoothing, softcap, z_loss = options
    invalid = (target != ignore_index) & ((target < 0) | (target >= weight.shape[0]))
    input = input + torch.where(invalid, torch.nan, 0.0).to(input.dtype).unsqueeze(-1)
    target = target.masked_fill(invalid, 0)
    logits = F.linear(input, weight, bias).float()
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(
        logits, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    kept = (target != ignore_index).to(logits.dtype)
    # A number times a loss would be float64 in a forward-mode derivative of its gradient, with which Torch then fails.
    squares = (z_loss * torch.logsumexp(logits, -1).square() * kept).sum()
    return loss + (squares / kept.sum() if reduction == "mean" else squares)


def _under_transform(*arguments):
    raise RuntimeError("loss: linear_cross_entropy computes its formula under a transform of torch.func")


transform_with("linear_cross_entropy", _under_transform)
refuse_cpu("cross_entropy_")
