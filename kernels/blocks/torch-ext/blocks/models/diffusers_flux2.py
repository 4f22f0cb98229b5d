"""Flux.2 in diffusers: its attention, by name for the reason of Flux.1's."""

from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from ..kernel_set import takes
from ..replacements import replaces
from ..rotary_tables import halves
from .diffusers_attention import (
    are_own_norms,
    dispatch_attention,
    library_of,
    norms_mismatch,
    projections_mismatch,
    rotated_heads,
)
from .diffusers_flux import attended_tokens, attends_with_own, head_norms_mismatch

_BothStreams = tuple[Tensor, Tensor]


@replaces(
    "diffusers.models.transformers.transformer_flux2.Flux2Attention",
    does="q and k norms with rotary embedding",
    kernels=("rope3d",),
    mismatch=head_norms_mismatch,
    relies_on=("Flux2AttnProcessor.__call__", "apply_rotary_emb"),
)
class Flux2Attention:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        image_rotary_emb: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> Union[Tensor, _BothStreams]:
        x, context, rotary = hidden_states, encoder_hidden_states, image_rotary_emb
        if kwargs or not attends_with_own(self, "Flux2AttnProcessor", x, context, rotary):
            return super().forward(x, context, attention_mask, rotary, **kwargs)
        attended = attended_tokens(self, x, context, attention_mask, rotary)
        to_out, dropout = self.to_out
        if context is None:
            return dropout(to_out(attended))
        attended_context, attended = attended.split((context.shape[1], x.shape[1]), dim=1)
        return dropout(to_out(attended)), self.to_add_out(attended_context)


def _parallel_mismatch(attention: nn.Module) -> Optional[str]:
    for size in (attention.inner_dim, attention.head_dim, attention.mlp_hidden_dim, attention.mlp_mult_factor):
        if not isinstance(size, int):
            return "its sizes are not numbers"
    return projections_mismatch(attention.to_qkv_mlp_proj, attention.mlp_act_fn, attention.to_out) or norms_mismatch(
        "torch.nn.modules.normalization.RMSNorm", attention.norm_q, attention.norm_k
    )


@replaces(
    "diffusers.models.transformers.transformer_flux2.Flux2ParallelSelfAttention",
    does="q and k norms with rotary embedding",
    kernels=("rope3d",),
    mismatch=_parallel_mismatch,
    relies_on=("Flux2ParallelSelfAttnProcessor.__call__", "apply_rotary_emb"),
)
class Flux2ParallelAttention:
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Optional[Tensor] = None,
        image_rotary_emb: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> Tensor:
        x, rotary, processor = hidden_states, image_rotary_emb, self.processor
        norms = self.norm_q, self.norm_k
        if not (
            rotary is not None
            and takes(x)
            and not kwargs
            and type(processor) is library_of(self).Flux2ParallelSelfAttnProcessor
            and are_own_norms(nn.RMSNorm, x.dtype, *norms)
        ):
            return super().forward(x, attention_mask, rotary, **kwargs)
        projected = self.to_qkv_mlp_proj(x)
        # By ratio: with tensor parallelism the projection returns a part of q, k, v and hidden states each.
        of_heads, of_hidden = 3 * self.inner_dim, self.mlp_hidden_dim * self.mlp_mult_factor
        size = of_heads * projected.shape[-1] // (of_heads + of_hidden)
        joined, hidden = projected[..., :size], projected[..., size:]
        heads = rotated_heads(joined.chunk(3, dim=-1), norms, halves(*rotary), self.head_dim)
        attended = dispatch_attention(library_of(self), processor, *heads, attention_mask)
        return self.to_out(torch.cat((attended, self.mlp_act_fn(hidden)), dim=-1))
