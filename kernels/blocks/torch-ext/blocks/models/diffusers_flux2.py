"""Flux.2 in diffusers."""

from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from ..kernel_set import adaln, geglu, takes
from ..replacements import is_own, original_class, path_of, replaces
from ..rotary_tables import halves
from .diffusers_attention import (
    are_own,
    are_own_norms,
    dispatch_attention,
    joined_tokens,
    library_of,
    norms_mismatch,
    plain_layer_norms_mismatch,
    projections_mismatch,
    rotated_heads,
    transformed,
    within_float16,
)
from .diffusers_flux import attended_tokens, attends_with_own, head_norms_mismatch

_BothStreams = tuple[Tensor, Tensor]


def _block_mismatch(block: nn.Module) -> Optional[str]:
    return plain_layer_norms_mismatch(block.norm1, block.norm1_context, block.norm2, block.norm2_context)


@replaces(
    "diffusers.models.transformers.transformer_flux2.Flux2TransformerBlock",
    does="LayerNorm with modulation, and residual sums with gates and norms",
    kernels=("adaln",),
    mismatch=_block_mismatch,
)
class Flux2Block:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb_mod_img: Tensor,
        temb_mod_txt: Tensor,
        image_rotary_emb: Optional[_BothStreams] = None,
        joint_attention_kwargs: Optional[dict[str, Any]] = None,
    ) -> _BothStreams:
        x, context, more = hidden_states, encoder_hidden_states, joint_attention_kwargs
        norms = self.norm1, self.norm1_context, self.norm2, self.norm2_context
        if not (
            takes(x)
            and context.dtype == x.dtype
            and _fits(temb_mod_img, x)
            and _fits(temb_mod_txt, context)
            and are_own(nn.LayerNorm, *norms)
        ):
            return super().forward(x, context, temb_mod_img, temb_mod_txt, image_rotary_emb, more)
        shift, scale, *modulation = temb_mod_img.chunk(6, dim=-1)
        c_shift, c_scale, *context_modulation = temb_mod_txt.chunk(6, dim=-1)
        attended, attended_context = self.attn(
            hidden_states=adaln.ada_layer_norm(x, scale, shift, eps=self.norm1.eps, rounding="each"),
            encoder_hidden_states=adaln.ada_layer_norm(
                context, c_scale, c_shift, eps=self.norm1_context.eps, rounding="each"
            ),
            image_rotary_emb=image_rotary_emb,
            **(more or {}),
        )
        x = transformed(x, attended, self.norm2, self.ff, modulation)
        context = transformed(context, attended_context, self.norm2_context, self.ff_context, context_modulation)
        return within_float16(context), x


def _fits(modulation: Tensor, x: Tensor) -> bool:
    """Return whether kernels take the parts of `modulation` for x: with a row for each sequence or each token."""
    if modulation.dtype != x.dtype or modulation.shape[0] != x.shape[0]:
        return False
    return modulation.dim() == 2 or (modulation.dim() == 3 and modulation.shape[1] in (1, x.shape[1]))


def _single_block_mismatch(block: nn.Module) -> Optional[str]:
    return plain_layer_norms_mismatch(block.norm)


@replaces(
    "diffusers.models.transformers.transformer_flux2.Flux2SingleTransformerBlock",
    does="LayerNorm with modulation, and residual sum with gate",
    kernels=("adaln",),
    mismatch=_single_block_mismatch,
)
class Flux2SingleBlock:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Optional[Tensor],
        temb_mod: Tensor,
        image_rotary_emb: Optional[_BothStreams] = None,
        joint_attention_kwargs: Optional[dict[str, Any]] = None,
        split_hidden_states: bool = False,
        text_seq_len: Optional[int] = None,
    ) -> Union[Tensor, _BothStreams]:
        x, context, more, tokens = hidden_states, encoder_hidden_states, joint_attention_kwargs, text_seq_len
        if context is not None and takes(x) and context.dtype == x.dtype:
            x, context, tokens = joined_tokens(context, x), None, context.shape[1]
        if not (takes(x) and context is None and _fits(temb_mod, x) and is_own(self.norm, nn.LayerNorm)):
            return super().forward(x, context, temb_mod, image_rotary_emb, more, split_hidden_states, tokens)
        shift, scale, gate = temb_mod.chunk(3, dim=-1)
        normed = adaln.ada_layer_norm(x, scale, shift, eps=self.norm.eps, rounding="each")
        attended = self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb, **(more or {}))
        x = within_float16(adaln.gate_residual(x, attended, gate, rounding="each"))
        return (x[:, :tokens], x[:, tokens:]) if split_hidden_states else x


@replaces(
    "diffusers.models.transformers.transformer_flux2.Flux2Attention",
    does="q and k norms with rotary embedding",
    kernels=("rope3d",),
    mismatch=head_norms_mismatch,
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


def _swiglu_mismatch(module: nn.Module) -> Optional[str]:
    return (
        None
        if path_of(original_class(module.gate_fn)) == "torch.nn.modules.activation.SiLU"
        else "its gate is not SiLU"
    )


@replaces(
    "diffusers.models.transformers.transformer_flux2.Flux2SwiGLU",
    does="SwiGLU",
    kernels=("geglu",),
    mismatch=_swiglu_mismatch,
)
class Flux2SwiGLU:
    def forward(self, x: Tensor) -> Tensor:
        if not (takes(x) and is_own(self.gate_fn, nn.SiLU)):
            return super().forward(x)
        return geglu.swiglu(x, gate="first")
