"""RMSNorm of q and k and their rotary embedding in one pass, and its gradient."""

from typing import Optional

import torch
from torch import Tensor, is_grad_enabled

from ._ops import ops
from .derivatives import FORWARD_AD, LEVEL, gradients, raise_unless_transformed
from .formulas import norm_rotate
from .rotary import Rotated, _form, is_second


def norm_rotary(
    q: Tensor,
    k: Optional[Tensor],
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    norm: str = "head",
    offset: float = 0.0,
    rounding: str = "last",
    pairs: str = "interleaved",
    layout: str = "bshd",
    head_dim: Optional[int] = None,
    rotary_dim: Optional[int] = None,
    prefix: int = 0,
) -> Rotated:
    """Return `apply_rotary(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin)`, in one pass over q and k.

    Args:
        q: float32, float16 or bfloat16, in the order of dimensions that `layout` names. The elements of a head must be
            adjacent to be read in place; the other dimensions may have any strides.
        k: Of the dtype and layout of q; it may have fewer heads. None: no k.
        q_weight: Of the dtype of q or float32. `[elements of a head]` with the norm `"head"`, else `[heads * elements
            of a head]`. None: no weight and no offset.
        k_weight: Likewise, for k.
        cos, sin, pairs, layout, head_dim, rotary_dim: As in `apply_rotary`.
        eps: Added to the mean of the squares.
        norm: The unit of normalization: `"head"`, each head (Qwen3, Gemma 3, Flux, HunyuanVideo, Qwen-Image), or
            `"token"`, all heads of a token (LTX-Video, Wan, Olmo 2).
        offset: Added to the weights, in float32: 1 for Gemma.
        rounding: `"last"` rounds the normalized values to the dtype of q, and nothing before them (Gemma, Olmo 2,
            `torch.nn.RMSNorm`). `"before_weight"` also rounds them before they are multiplied by the weight (Qwen,
            diffusers).
        prefix: The number of tokens at the start of each sequence that are normalized, but not rotated.

    Returns:
        q and k, contiguous in their order of dimensions. None in place of k if there is no k.

    The arithmetic is float32. The normalized values are rounded to the dtype of q before they are rotated, as in two
    separate steps, also where a float32 weight would make them float32. The rotation is rounded once. q, k and the
    weights get gradients, which ignore the roundings.

    Raises:
        TypeError, RuntimeError, ValueError: As `rope3d`.
    """
    head_dim, half, heads_first = _form(pairs, layout, head_dim)
    per_token = is_second(norm, "norm", "head", "token")
    options = eps, per_token, offset, is_second(rounding, "rounding", "last", "before_weight")
    if rotary_dim or prefix or head_dim or half or heads_first:
        options = *options, rotary_dim or 0, prefix, head_dim, half, heads_first
    grad_enabled = is_grad_enabled()
    try:
        if FORWARD_AD[LEVEL] < 0 and not (
            grad_enabled and (cos.requires_grad or sin.requires_grad)  # the kernel does not have their gradients
        ):
            if grad_enabled:
                for tensor in (q, k, q_weight, k_weight):
                    if tensor is not None and tensor.requires_grad:
                        return _NormRotary.apply(q, k, q_weight, k_weight, (cos, sin), options)
            return _norm_rotate(q, k, q_weight, k_weight, cos, sin, *options)
    except Exception as error:
        raise_unless_transformed(error, norm_rotary, locals())
    return norm_rotate(q, k, q_weight, k_weight, cos, sin, *options)


_norm_rotate = ops.norm_rotate.default
_norm_rotate_backward = ops.norm_rotate_backward.default


class _NormRotary(torch.autograd.Function):
    # Tables and options go as tuples: each argument of `apply` costs the host time, forward and backward.
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, tables, options):
        ctx.save_for_backward(q, k, q_weight, k_weight, *tables)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return _norm_rotate(q, k, q_weight, k_weight, *tables, *options)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        if grad_q is None and grad_k is None:
            return (None,) * 6
        of_q, of_k, of_q_weight, of_k_weight, _, _ = ctx.needs_input_grad
        if not of_q and not of_q_weight:
            grad_q = None
        if not of_k and not of_k_weight:
            grad_k = None
        wanted = of_q_weight and grad_q is not None, of_k_weight and grad_k is not None
        if is_grad_enabled():  # in a backward pass only with `create_graph=True`
            *input_grads, _, _ = gradients(norm_rotate, ctx.saved_tensors, ctx.options, (grad_q, grad_k))
            return *input_grads, None, None
        return *_norm_rotate_backward(grad_q, grad_k, *wanted, *ctx.saved_tensors, *ctx.options), None, None
