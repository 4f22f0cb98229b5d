"""CogVideoX in diffusers.

Known by name: the norm that follows a sum is inside another module, with its modulation.
"""

from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..kernel_set import adaln, rope3d, takes
from ..replacements import is_own, original_class, path_of, replaces
from ..rotary_tables import halves
from .diffusers_attention import diffusers_norms, heads_of, is_layer_norm, library_of

_LAYER_NORM = "torch.nn.modules.normalization.LayerNorm"

_BothStreams = tuple[Tensor, Tensor]


def _layer_norm_mismatch(*norms: nn.Module) -> Optional[str]:
    for norm in norms:
        if path_of(original_class(norm)) != _LAYER_NORM or len(norm.normalized_shape) != 1:
            return "its norms are not LayerNorms over one dimension"
    return None


def _norm_mismatch(module: nn.Module) -> Optional[str]:
    if not (isinstance(module.linear, nn.Module) and isinstance(module.silu, nn.Module)):
        return "its projection is not a module"
    return _layer_norm_mismatch(module.norm)


def _block_mismatch(block: nn.Module) -> Optional[str]:
    for norm in (block.norm1, block.norm2):
        if path_of(original_class(norm)) != "diffusers.models.normalization.CogVideoXLayerNormZero":
            return "its norms are not CogVideoXLayerNormZero"
    attention = block.attn1
    if path_of(original_class(attention)) != "diffusers.models.attention_processor.Attention":
        return "its attention is not diffusers.models.attention_processor.Attention"
    if attention.is_cross_attention or attention.to_out is None:
        return "its attention is cross-attention, or has no output projection"
    if attention.norm_q is None or attention.norm_k is None:
        return "its attention has no q and k norms"
    return _layer_norm_mismatch(attention.norm_q, attention.norm_k) or _norm_mismatch(block.norm2)


@replaces(
    "diffusers.models.transformers.cogvideox_transformer_3d.CogVideoXBlock",
    does="LayerNorm with modulation, residual sums with gates and norms, q and k norms and rotary embedding",
    kernels=("adaln", "rope3d"),
    mismatch=_block_mismatch,
    relies_on=("Attention.forward", "CogVideoXAttnProcessor2_0.__call__", "CogVideoXLayerNormZero.forward"),
)
class CogVideoXBlock:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Optional[tuple[Tensor, Tensor]] = None,
        attention_kwargs: Optional[dict[str, Any]] = None,
    ) -> _BothStreams:
        x, context, norm2 = hidden_states, encoder_hidden_states, self.norm2
        if not (
            takes(x)
            and temb.dtype == context.dtype == x.dtype
            and is_own(norm2, diffusers_norms().CogVideoXLayerNormZero)
            and is_layer_norm(norm2.norm, x.dtype)
        ):
            return super().forward(x, context, temb, image_rotary_emb, attention_kwargs)
        normed, normed_context, gate1, c_gate1 = self.norm1(x, context, temb)
        rotary = image_rotary_emb
        # The processor moves tables to the device of x.
        has_tables = rotary is None or rotary[0].device == x.device
        if not attention_kwargs and has_tables and _has_own_attention(self, x.dtype):
            attended, attended_context = _attend_to_both(self.attn1, normed, normed_context, rotary)
        else:
            attended, attended_context = self.attn1(
                hidden_states=normed,
                encoder_hidden_states=normed_context,
                image_rotary_emb=rotary,
                **(attention_kwargs or {}),
            )
        shift2, scale2, gate2, c_shift2, c_scale2, c_gate2 = norm2.linear(norm2.silu(temb)).chunk(6, dim=1)
        norm = norm2.norm
        options = norm.weight, norm.bias, norm.eps, "layer", "each"
        x, normed = adaln.gate_residual_ada_norm(x, attended, gate1, scale2[:, None], shift2[:, None], *options)
        context, normed_context = adaln.gate_residual_ada_norm(
            context, attended_context, c_gate1, c_scale2[:, None], c_shift2[:, None], *options
        )
        more = context.shape[1]
        branch = self.ff(torch.cat((normed_context, normed), dim=1))
        x = adaln.gate_residual(x, branch[:, more:], gate2, "each")
        return x, adaln.gate_residual(context, branch[:, :more], c_gate2, "each")


def _has_own_attention(block: nn.Module, dtype: torch.dtype) -> bool:
    attention, library = block.attn1, library_of(block)
    return (
        is_own(attention, library.Attention)
        and type(attention.processor) is library.CogVideoXAttnProcessor2_0
        and is_layer_norm(attention.norm_q, dtype)
        and is_layer_norm(attention.norm_k, dtype)
    )


def _attend_to_both(
    attention: nn.Module, x: Tensor, context: Tensor, rotary: Optional[tuple[Tensor, Tensor]]
) -> _BothStreams:
    """Return the attention of both streams to both, projected. The context comes first, and is not rotated."""
    heads, more, tokens = attention.heads, context.shape[1], x.shape[1]
    joined = torch.cat((context, x), dim=1)
    query, key, value = attention.to_q(joined), attention.to_k(joined), attention.to_v(joined)
    query, key = _normed(attention.norm_q, heads_of(query, heads)), _normed(attention.norm_k, heads_of(key, heads))
    if rotary is not None:
        query, key = rope3d.apply_rotary(query, key, *halves(*rotary), prefix=more)
    attended = scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), heads_of(value, heads).transpose(1, 2)
    )
    to_out, dropout = attention.to_out
    attended_context, attended = dropout(to_out(attended.transpose(1, 2).flatten(2))).split((more, tokens), dim=1)
    return attended, attended_context


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    return adaln.ada_layer_norm(x, None, None, norm.weight, norm.bias, norm.eps)
