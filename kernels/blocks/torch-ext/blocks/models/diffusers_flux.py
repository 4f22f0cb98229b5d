"""Flux.1 in diffusers.

Its attention is known by name: the processor joins both streams between the norms of q and k and their rotary
embedding, and one kernel for both must run before.
"""

from typing import Any, Optional, Union

from torch import Tensor, nn

from ..kernel_set import takes
from ..replacements import replaces
from ..rotary_tables import halves
from .diffusers_attention import (
    are_own_norms,
    dispatch_attention,
    joined_heads,
    library_of,
    norms_mismatch,
    rotated_heads,
    split_tables,
)

_BothStreams = tuple[Tensor, Tensor]


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
    relies_on=("FluxAttnProcessor.__call__", "apply_rotary_emb"),
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
