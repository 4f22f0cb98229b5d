"""Attention of diffusers without rotary embedding, as its processors compute it, without copies that they make."""

import sys
from types import ModuleType
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..replacements import is_own
from .diffusers_attention import heads_of, mask_of_heads

_ATTENTION = "diffusers.models.attention_processor.Attention"
_RMS_NORM = "diffusers.models.normalization.RMSNorm"


def _processors() -> ModuleType:
    return sys.modules["diffusers.models.attention_processor"]


def attend(
    attention: nn.Module, x: Tensor, context: Optional[Tensor], mask: Optional[Tensor], options: dict[str, Any]
) -> Tensor:
    """Return `attention(x, context, mask, **options)`, without a division by one where the processor is the default."""
    if options or not (_is_plain(attention) and (context is None or isinstance(context, Tensor))):
        return attention(x, encoder_hidden_states=context, attention_mask=mask, **options)
    source = x if context is None else context
    heads = tuple(_heads(attention, x) for x in (attention.to_q(x), attention.to_k(source), attention.to_v(source)))
    mask = mask_of_heads(attention, mask, source)
    to_out, dropout = attention.to_out
    return dropout(to_out(_attended(*heads, mask)))


def _is_plain(attention: nn.Module) -> bool:
    return (
        is_own(attention, _ATTENTION)
        and type(attention.processor) is _processors().AttnProcessor2_0
        and attention.spatial_norm is attention.group_norm is attention.norm_q is attention.norm_k is None
        and not attention.norm_cross
        and not attention.residual_connection
        and attention.rescale_output_factor == 1.0
    )


def attend_jointly(
    attention: nn.Module, x: Tensor, context: Optional[Tensor], options: dict[str, Any]
) -> tuple[Tensor, Optional[Tensor]]:
    """Return `attention(x, context, **options)`: the attention of both streams to both, and None for no context.

    With the processor of Stable Diffusion 3, the projections get contiguous tensors: of others they make copies, and
    add their bias in a kernel of its own.
    """
    if options or not _is_joint(attention):
        attended = attention(hidden_states=x, encoder_hidden_states=context, **options)
        return attended if isinstance(attended, tuple) else (attended, None)
    query, key = _heads(attention, attention.to_q(x), "norm_q"), _heads(attention, attention.to_k(x), "norm_k")
    value = _heads(attention, attention.to_v(x))
    if context is not None:
        query = torch.cat((query, _heads(attention, attention.add_q_proj(context), "norm_added_q")), dim=1)
        key = torch.cat((key, _heads(attention, attention.add_k_proj(context), "norm_added_k")), dim=1)
        value = torch.cat((value, _heads(attention, attention.add_v_proj(context))), dim=1)
    attended = _attended(query, key, value, None)
    to_out, dropout = attention.to_out
    if context is None:
        return dropout(to_out(attended)), None
    attended, attended_context = attended.split((x.shape[1], context.shape[1]), dim=1)
    if not attention.context_pre_only:
        attended_context = attention.to_add_out(attended_context.contiguous())
    return dropout(to_out(attended.contiguous())), attended_context


def _is_joint(attention: nn.Module) -> bool:
    return (
        is_own(attention, _ATTENTION)
        and type(attention.processor) is _processors().JointAttnProcessor2_0
        and all(
            norm is None or is_own(norm, _RMS_NORM)
            for norm in (attention.norm_q, attention.norm_k, attention.norm_added_q, attention.norm_added_k)
        )
    )


def _heads(attention: nn.Module, x: Tensor, norm: Optional[str] = None) -> Tensor:
    """Return `[batch, tokens, heads, elements]`, normalized if the attention has the norm."""
    x, module = heads_of(x, attention.heads), norm and getattr(attention, norm)
    return x if module is None else module(x)


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Return the attention of `[batch, tokens, heads, elements]`, with the heads joined."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
