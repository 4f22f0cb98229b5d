"""HunyuanVideo in diffusers.

Known by name: the processor rotates a part of the tokens, and copies both streams, after the norms. That tables may be
kept cannot be probed.
"""

from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..gated import activated_projection
from ..kernel_set import adaln, rmsnorm, rope3d, takes
from ..replacements import is_own, original_class, path_of, replaces
from ..rotary_tables import halves, keep_tables
from ..tokens import joined_tokens
from .diffusers_attention import (
    ada_norms_mismatch,
    are_own,
    are_own_norms,
    diffusers_norms,
    dispatch_attention,
    heads_of,
    library_of,
    norms_mismatch,
    plain_layer_norms_mismatch,
    projections_mismatch,
    transformed,
)

_ATTENTION = "diffusers.models.attention_processor.Attention"
_RMS_NORM = "diffusers.models.normalization.RMSNorm"

_BothStreams = tuple[Tensor, Tensor]


def _block_mismatch(block: nn.Module) -> Optional[str]:
    attention = block.attn
    if attention.add_q_proj is None or attention.to_out is None or attention.to_add_out is None:
        return "its attention does not project both streams"
    return (
        plain_layer_norms_mismatch(block.norm2, block.norm2_context)
        or ada_norms_mismatch("AdaLayerNormZero", block.norm1, block.norm1_context)
        or _attention_mismatch(attention, attention.norm_added_q, attention.norm_added_k)
    )


def _attention_mismatch(attention: nn.Module, *norms: nn.Module) -> Optional[str]:
    if path_of(original_class(attention)) != _ATTENTION:
        return f"its attention is not {_ATTENTION}"
    return norms_mismatch(_RMS_NORM, attention.norm_q, attention.norm_k, *norms)


@replaces(
    "diffusers.models.transformers.transformer_hunyuan_video.HunyuanVideoTransformerBlock",
    does="LayerNorm with modulation, residual sums with gates and norms, q and k norms with rotary embedding",
    kernels=("adaln", "rmsnorm", "rope3d"),
    mismatch=_block_mismatch,
    relies_on=("Attention.forward", "HunyuanVideoAttnProcessor2_0.__call__"),
)
class HunyuanVideoBlock:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        attention_mask: Optional[Tensor] = None,
        freqs_cis: Optional[tuple[Tensor, Tensor]] = None,
        *args: Any,
        **kwargs: Any,
    ) -> _BothStreams:
        x, context = hidden_states, encoder_hidden_states
        if not (
            takes(x)
            and temb.dtype == context.dtype == x.dtype
            and are_own(nn.LayerNorm, self.norm2, self.norm2_context)
        ):
            return super().forward(x, context, temb, attention_mask, freqs_cis, *args, **kwargs)
        normed, *modulation = self.norm1(x, emb=temb)
        normed_context, *context_modulation = self.norm1_context(context, emb=temb)
        if _has_own_attention(self, x.dtype, freqs_cis):
            attended, attended_context = _attend_to_both(self, normed, normed_context, attention_mask, freqs_cis)
        else:
            attended, attended_context = self.attn(
                hidden_states=normed,
                encoder_hidden_states=normed_context,
                attention_mask=attention_mask,
                image_rotary_emb=freqs_cis,
            )
        x = transformed(x, attended, self.norm2, self.ff, modulation)
        context = transformed(context, attended_context, self.norm2_context, self.ff_context, context_modulation)
        return x, context


def _single_block_mismatch(block: nn.Module) -> Optional[str]:
    attention = block.attn
    if attention.add_q_proj is not None or attention.to_out is not None or attention.to_add_out is not None:
        return "its attention has projections of its own for a stream"
    return (
        projections_mismatch(block.proj_mlp, block.act_mlp, block.proj_out)
        or ada_norms_mismatch("AdaLayerNormZeroSingle", block.norm)
        or _attention_mismatch(attention)
    )


@replaces(
    "diffusers.models.transformers.transformer_hunyuan_video.HunyuanVideoSingleTransformerBlock",
    does="residual sum with gate, q and k norms with rotary embedding, without copies of both streams",
    kernels=("adaln", "rope3d"),
    mismatch=_single_block_mismatch,
    relies_on=("Attention.forward", "HunyuanVideoAttnProcessor2_0.__call__"),
)
class HunyuanVideoSingleBlock:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        attention_mask: Optional[Tensor] = None,
        image_rotary_emb: Optional[tuple[Tensor, Tensor]] = None,
        *args: Any,
        **kwargs: Any,
    ) -> _BothStreams:
        context, rotary = encoder_hidden_states, image_rotary_emb
        if not (
            takes(hidden_states)
            and temb.dtype == context.dtype == hidden_states.dtype
            and _has_own_attention(self, temb.dtype, rotary)
        ):
            return super().forward(hidden_states, context, temb, attention_mask, rotary, *args, **kwargs)
        more = context.shape[1]
        x = joined_tokens(hidden_states, context)
        normed, gate = self.norm(x, emb=temb)
        hidden = activated_projection(self.act_mlp, self.proj_mlp, normed)
        attended = _attend_to_joined(self, normed, more, attention_mask, rotary)
        branch = self.proj_out(torch.cat((attended, hidden), dim=2))
        x = adaln.gate_residual(x, branch, gate, rounding="each")
        return x[:, :-more], x[:, -more:]


def _has_own_attention(block: nn.Module, dtype: torch.dtype, rotary: Optional[tuple[Tensor, Tensor]]) -> bool:
    attention, library = block.attn, library_of(block)
    if rotary is None or not is_own(attention, library.Attention):
        return False
    if type(attention.processor) is not library.HunyuanVideoAttnProcessor2_0:
        return False
    norms = [attention.norm_q, attention.norm_k]
    if attention.add_q_proj is not None:
        norms += [attention.norm_added_q, attention.norm_added_k]
    return are_own_norms(diffusers_norms().RMSNorm, dtype, *norms)


def _attend_to_both(
    block: nn.Module, x: Tensor, context: Tensor, mask: Optional[Tensor], rotary: tuple[Tensor, Tensor]
) -> _BothStreams:
    """Return the attention of both streams to both, projected."""
    attention = block.attn
    heads, norm_q, norm_k = attention.heads, attention.norm_added_q, attention.norm_added_k
    query, key = _normed_and_rotated(attention, x, *halves(*rotary))
    context_query = heads_of(attention.add_q_proj(context), heads)
    context_key = heads_of(attention.add_k_proj(context), heads)
    context_query = rmsnorm.rms_norm(context_query, norm_q.weight, norm_q.eps, rounding="before_weight")
    context_key = rmsnorm.rms_norm(context_key, norm_k.weight, norm_k.eps, rounding="before_weight")
    value = torch.cat((attention.to_v(x), attention.add_v_proj(context)), dim=1)
    query, key = torch.cat((query, context_query), dim=1), torch.cat((key, context_key), dim=1)
    attended = dispatch_attention(library_of(block), attention.processor, query, key, heads_of(value, heads), mask)
    attended, attended_context = attended.split((x.shape[1], context.shape[1]), dim=1)
    to_out, dropout = attention.to_out
    # A projection copies what is not contiguous, and then adds its bias in a kernel of its own.
    return dropout(to_out(attended.contiguous())), attention.to_add_out(attended_context.contiguous())


def _attend_to_joined(
    block: nn.Module, x: Tensor, more: int, mask: Optional[Tensor], rotary: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the attention of the tokens of both streams to all, of which the last `more` are not rotated."""
    attention = block.attn
    query, key = _normed_and_rotated(attention, x, *halves(*rotary, more))
    return dispatch_attention(
        library_of(block), attention.processor, query, key, heads_of(attention.to_v(x), attention.heads), mask
    )


def _normed_and_rotated(attention: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    norm_q, norm_k, heads = attention.norm_q, attention.norm_k, attention.heads
    query, key = heads_of(attention.to_q(x), heads), heads_of(attention.to_k(x), heads)
    options = {"eps": norm_q.eps, "rounding": "before_weight"}
    return rope3d.norm_rotary(query, key, norm_q.weight, norm_k.weight, cos, sin, **options)


def _rotary_mismatch(rotary: nn.Module) -> Optional[str]:
    numbers = (rotary.patch_size, rotary.patch_size_t, rotary.theta, *rotary.rope_dim)
    return None if all(isinstance(number, (int, float)) for number in numbers) else "its sizes are not numbers"


@replaces(
    "diffusers.models.transformers.transformer_hunyuan_video.HunyuanVideoRotaryPosEmbed",
    does="keeps tables between forwards",
    kernels=(),
    mismatch=_rotary_mismatch,
)
class HunyuanVideoRotary:
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        own = super().forward
        if not takes(hidden_states):
            return own(hidden_states)
        sizes = self.patch_size, self.patch_size_t, tuple(self.rope_dim), self.theta
        key = hidden_states.device, hidden_states.shape[2:], sizes
        return keep_tables(self, key, lambda: own(hidden_states))
