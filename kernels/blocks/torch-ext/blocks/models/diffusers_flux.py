"""Flux.1 in diffusers."""

from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from ..kernel_set import adaln, takes
from ..replacements import original_class, path_of, replaces
from ..rotary_tables import halves
from .diffusers_attention import (
    ada_norms_mismatch,
    are_own,
    are_own_norms,
    dispatch_attention,
    joined_heads,
    joined_tokens,
    library_of,
    norms_mismatch,
    plain_layer_norms_mismatch,
    projections_mismatch,
    rotated_heads,
    split_tables,
    transformed,
    within_float16,
)
from ..gated import activated_projection

_BothStreams = tuple[Tensor, Tensor]


def _block_mismatch(block: nn.Module) -> Optional[str]:
    return ada_norms_mismatch("AdaLayerNormZero", block.norm1, block.norm1_context) or plain_layer_norms_mismatch(
        block.norm2, block.norm2_context
    )


@replaces(
    "diffusers.models.transformers.transformer_flux.FluxTransformerBlock",
    does="residual sums with gates and norms",
    kernels=("adaln",),
    mismatch=_block_mismatch,
)
class FluxBlock:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Optional[_BothStreams] = None,
        joint_attention_kwargs: Optional[dict[str, Any]] = None,
    ) -> _BothStreams:
        x, context, more = hidden_states, encoder_hidden_states, joint_attention_kwargs
        if not (
            takes(x)
            and temb.dtype == context.dtype == x.dtype
            and are_own(nn.LayerNorm, self.norm2, self.norm2_context)
        ):
            return super().forward(x, context, temb, image_rotary_emb, more)
        normed, *modulation = self.norm1(x, emb=temb)
        normed_context, *context_modulation = self.norm1_context(context, emb=temb)
        attended, attended_context, *of_image_prompt = self.attn(
            hidden_states=normed,
            encoder_hidden_states=normed_context,
            image_rotary_emb=image_rotary_emb,
            **(more or {}),
        )
        x = transformed(x, attended, self.norm2, self.ff, modulation)
        for branch in of_image_prompt:
            x = x + branch
        context = transformed(context, attended_context, self.norm2_context, self.ff_context, context_modulation)
        return within_float16(context), x


def _single_block_mismatch(block: nn.Module) -> Optional[str]:
    if path_of(original_class(block.attn)) != "diffusers.models.transformers.transformer_flux.FluxAttention":
        return "its attention is not FluxAttention"
    return projections_mismatch(block.proj_mlp, block.act_mlp, block.proj_out) or ada_norms_mismatch(
        "AdaLayerNormZeroSingle", block.norm
    )


@replaces(
    "diffusers.models.transformers.transformer_flux.FluxSingleTransformerBlock",
    does="residual sum with gate, without copies of both streams",
    kernels=("adaln",),
    mismatch=_single_block_mismatch,
)
class FluxSingleBlock:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Optional[_BothStreams] = None,
        joint_attention_kwargs: Optional[dict[str, Any]] = None,
    ) -> _BothStreams:
        context, more = encoder_hidden_states, joint_attention_kwargs
        if not (takes(hidden_states) and temb.dtype == context.dtype == hidden_states.dtype):
            return super().forward(hidden_states, context, temb, image_rotary_emb, more)
        x = joined_tokens(context, hidden_states)
        normed, gate = self.norm(x, emb=temb)
        hidden = activated_projection(self.act_mlp, self.proj_mlp, normed)
        attended = self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb, **(more or {}))
        branch = self.proj_out(torch.cat((attended, hidden), dim=2))
        x = within_float16(adaln.gate_residual(x, branch, gate, rounding="each"))
        tokens = context.shape[1]
        return x[:, :tokens], x[:, tokens:]


def head_norms_mismatch(attention: nn.Module) -> Optional[str]:
    """Return why q and k of an attention of Flux.1 or Flux.2 cannot be computed by kernels."""
    if not isinstance(attention.head_dim, int):
        return "the size of its heads is not a number"
    if not isinstance(attention.fused_projections, bool):
        return "it does not say whether its projections are fused"
    return norms_mismatch("torch.nn.modules.normalization.RMSNorm", *_norms(attention))


def _norms(attention: nn.Module) -> tuple[nn.Module, ...]:
    norms = attention.norm_q, attention.norm_k
    if attention.added_kv_proj_dim is not None:
        norms += attention.norm_added_q, attention.norm_added_k
    return norms


def attends_with_own(attention: nn.Module, processor: str, x: Tensor, context: Optional[Tensor], rotary: Any) -> bool:
    """Return whether kernels may compute q and k of an attention of Flux.1 or Flux.2, with the named processor."""
    return (
        rotary is not None
        and takes(x)
        and type(attention.processor) is getattr(library_of(attention), processor)
        and (context is None) == (attention.added_kv_proj_dim is None)
        and are_own_norms(nn.RMSNorm, x.dtype, *_norms(attention))
    )


def attended_tokens(
    attention: nn.Module, x: Tensor, context: Optional[Tensor], mask: Optional[Tensor], rotary: _BothStreams
) -> Tensor:
    """Return the attention of all tokens to all, those of `context` first, before the projections of the output."""
    fused, head_dim, tables = attention.fused_projections, attention.head_dim, halves(*rotary)
    if fused:
        projected = attention.to_qkv(x).chunk(3, dim=-1)
    else:
        projected = attention.to_q(x), attention.to_k(x), attention.to_v(x)
    norms = attention.norm_q, attention.norm_k
    if context is None:
        heads = rotated_heads(projected, norms, tables, head_dim)
    else:
        of_context, of_x = split_tables(tables, context.shape[1])
        heads = rotated_heads(projected, norms, of_x, head_dim)
        if fused:
            projected = attention.to_added_qkv(context).chunk(3, dim=-1)
        else:
            projected = attention.add_q_proj(context), attention.add_k_proj(context), attention.add_v_proj(context)
        norms = attention.norm_added_q, attention.norm_added_k
        heads = joined_heads(rotated_heads(projected, norms, of_context, head_dim), heads)
    return dispatch_attention(library_of(attention), attention.processor, *heads, mask)


@replaces(
    "diffusers.models.transformers.transformer_flux.FluxAttention",
    does="q and k norms with rotary embedding",
    kernels=("rope3d",),
    mismatch=head_norms_mismatch,
)
class FluxAttention:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        image_rotary_emb: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> Union[Tensor, _BothStreams]:
        x, context, rotary = hidden_states, encoder_hidden_states, image_rotary_emb
        if kwargs or not attends_with_own(self, "FluxAttnProcessor", x, context, rotary):
            return super().forward(x, context, attention_mask, rotary, **kwargs)
        attended = attended_tokens(self, x, context, attention_mask, rotary)
        if context is None:
            return attended
        attended_context, attended = attended.split((context.shape[1], x.shape[1]), dim=1)
        to_out, dropout = self.to_out
        # A projection copies what is not contiguous, and then adds its bias in a kernel of its own.
        return dropout(to_out(attended.contiguous())), self.to_add_out(attended_context.contiguous())
