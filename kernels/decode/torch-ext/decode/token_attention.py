"""Attention of one token per sequence: the public function, and the fakes of its ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from ._ops import add_op_namespace_prefix, ops
from .dispatch import has_tensor_cores, is_for_torch


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    new_key: Tensor | None = None,
    new_value: Tensor | None = None,
    position: Tensor | None = None,
    constant_cache: bool = False,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    rounding: str = "last",
) -> Tensor:
    """Return the attention of one token per sequence, [batch, 1, query_heads, elements], contiguous, rounded once.

    Query head h reads key head `h // (query_heads // key_heads)`. Tensors are float32, float16 or bfloat16. They are
    read in place where the elements of a head are adjacent.

    Args:
        query: [batch, query_heads, 1, elements]; elements is a multiple of 8, at most 256.
        key: [batch, key_heads, tokens, elements], of the dtype of `query`; query_heads is a multiple of key_heads.
        value: Of the shape and dtype of `key`.
        mask: bool, [batch or 1, 1, 1, tokens]: the tokens that are read. A sequence without any gives zeros.
        scale: Of the products of query and key; by default 1 / sqrt(elements).
        new_key: [batch, key_heads, 1, elements]: the key of the token itself, which is written to `key` at `position`
            and read from there. `key` and `value` are then changed in place; their elements must be adjacent, and on
            CUDA their heads must start at 16-byte boundaries.
        new_value: The same for `value`.
        position: One int64 on the device of `query`, at least 0 and below tokens. On CUDA it is not checked.
        constant_cache: Whether no kernel that may still run writes `key` or `value`. On CUDA reading them then begins
            before earlier kernels of the stream end. It needs `position`, which is written by this call.

        cos: With `position`: `query` and `new_key` are rotated first, elements i and i + elements / 2 by the angle of
            entry i. [1 or batch, n]; n is `elements`, whose second half repeats the first, or half of it.
        sin: Of the shape and dtype of `cos`.
        query_weight: With `cos`: each head of `query` is normalized before that, by the root of the mean of its
            squares. [elements]. The result is rounded.
        key_weight: The same for `new_key`.
        eps: Added to the mean of the squares.
        offset: Added to the weights: 1 for Gemma.
        rounding: "last", or "before_weight", where normalized values are also rounded before the weight.

    Norm and rotation are those of `rope3d.norm_rotary`. On CUDA, with heads of 64, 128 or 256 elements and tables and
    weights of the dtype of `query`, the kernel computes them; elsewhere Torch operations do.

    The kernel has no gradient. In autocast, in forward-mode differentiation, and where a tensor needs a gradient,
    `torch.nn.functional.scaled_dot_product_attention` computes it, after `index_copy_` for the new token. On
    CUDA also for float32, and on devices of a capability below 8.0.

    Raises:
        ValueError: If only some of `new_key`, `new_value` and `position` are given, or `constant_cache` or `cos`
            without them; if only one of `cos` and `sin`, or of the weights, is given, or weights without `cos`; if
            `rounding` is unknown.
        RuntimeError: If a tensor has a wrong shape, dtype or device; the message names it.
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    tensors = query, key, value, new_key, new_value, cos, sin, query_weight, key_weight
    by_torch = is_for_torch(*tensors) or not has_tensor_cores(query)
    is_rotated = cos is not None or sin is not None or query_weight is not None or key_weight is not None
    if new_key is None and new_value is None and position is None and not constant_cache and not is_rotated:
        return (_attention_by_torch if by_torch else _attention)(query, key, value, mask, scale)
    if new_key is None or new_value is None or position is None:
        raise ValueError(
            "decode: new_key, new_value and position must be given together, and with constant_cache or cos"
        )
    options: tuple = (True,) if constant_cache else ()
    if is_rotated:
        _check_rotary(cos, sin, query_weight, key_weight, rounding)
        rotary = cos, sin, query_weight, key_weight, eps, offset, rounding == "before_weight"
        types = {tensor.dtype for tensor in (query, cos, sin, query_weight, key_weight) if tensor is not None}
        if by_torch or not query.is_cuda or query.shape[-1] not in (64, 128, 256) or len(types) > 1:
            query, new_key = _rotated(query, new_key, *rotary)
        else:
            options = constant_cache, *rotary
    if by_torch:
        return _cached_attention_by_torch(query, new_key, new_value, key, value, position, mask, scale)
    result = _cached_attention(query, new_key, new_value, key, value, position, mask, scale, *options)
    increment_version((key, value))  # the dispatcher does it only for ops that autograd knows
    return result


def _check_rotary(cos, sin, query_weight, key_weight, rounding):
    if cos is None or sin is None:
        raise ValueError("decode: cos and sin must be given together, and with weights")
    if (query_weight is None) != (key_weight is None):
        raise ValueError("decode: query_weight and key_weight must be given together")
    if rounding not in ("last", "before_weight"):
        raise ValueError(f'decode: rounding must be "last" or "before_weight", not {rounding!r}')


def _rotated(query, key, cos, sin, query_weight, key_weight, eps, offset, rounded_before_weight):
    """Return query and key, normalized and rotated by Torch operations, rounded where the kernel rounds."""
    half = query.shape[-1] // 2
    cosines, sines = (table[:, None, None, :half].float() for table in (cos, sin))
    results = []
    for x, weight in ((query, query_weight), (key, key_weight)):
        wide = x.float()
        if weight is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            if rounded_before_weight:
                wide = wide.to(x.dtype).float()
            wide = (wide * (weight.float() + offset)).to(x.dtype).float()
        a, b = wide.chunk(2, -1)
        results.append(torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1).to(x.dtype))
    return results


_attention = ops.attention.default
_cached_attention = ops.cached_attention.default


# --- by Torch --------------------------------------------------------------------------------------------------------


def _attention_by_torch(query, key, value, mask, scale):
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def _cached_attention_by_torch(query, new_key, new_value, key, value, position, mask, scale):
    key.index_copy_(2, position.reshape(1), new_key.to(key.dtype))
    value.index_copy_(2, position.reshape(1), new_value.to(value.dtype))
    return _attention_by_torch(query, key, value, mask, scale)


# --- fakes -----------------------------------------------------------------------------------------------------------


# They state the shapes and dtypes of results; the binding checks the arguments.


@torch.library.register_fake(add_op_namespace_prefix("attention"))
def _attention_fake(query, key, value, mask, scale):
    batch, query_heads, _, elements = query.shape
    return query.new_empty([batch, 1, query_heads, elements])


@torch.library.register_fake(add_op_namespace_prefix("cached_attention"))
def _cached_attention_fake(query, new_key, new_value, key, value, position, mask, scale, *options):
    return _attention_fake(query, key, value, mask, scale)
