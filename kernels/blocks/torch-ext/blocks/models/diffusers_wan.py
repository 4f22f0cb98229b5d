"""Wan 2.1 and 2.2 in diffusers, and the models that have their blocks: VACE, Animate, ChronoEdit.

Known by name: the blocks convert to float32 and back between the operations that one kernel computes in float32, and
the processor makes its rotary function anew at each call. That tables may be kept cannot be probed.
"""

from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..kernel_set import adaln, rope3d, takes
from ..norms import weight_for
from ..replacements import is_own, original_class, path_of, replaces
from ..rotary_tables import halves, keep_tables
from .diffusers_attention import (
    are_own_norms,
    diffusers_norms,
    dispatch_attention,
    heads_of,
    library_of,
    norms_mismatch,
)

_NORM = "diffusers.models.normalization.FP32LayerNorm"


def _block_mismatch(block: nn.Module) -> Optional[str]:
    for norm in (block.norm1, block.norm3):
        if path_of(original_class(norm)) != _NORM or norm.weight is not None or norm.bias is not None:
            return f"its first and third norm are not {_NORM} without weight and bias"
    if type(block.norm2) is not nn.Identity and path_of(original_class(block.norm2)) != _NORM:
        return f"its second norm is not {_NORM}"
    norms = [norm for norm in (block.norm1, block.norm2, block.norm3) if type(norm) is not nn.Identity]
    if any(len(norm.normalized_shape) != 1 for norm in norms):
        return "its norms normalize over several dimensions"
    if block.scale_shift_table.dim() != 3 or block.scale_shift_table.shape[:2] != (1, 6):
        return "its modulation does not have six parts"
    return None


@replaces(
    "diffusers.models.transformers.transformer_wan.WanTransformerBlock",
    "diffusers.models.transformers.transformer_wan_animate.WanTransformerBlock",
    "diffusers.models.transformers.transformer_chronoedit.WanTransformerBlock",
    does="LayerNorm with modulation, and residual sums with gates and norms",
    kernels=("adaln",),
    mismatch=_block_mismatch,
)
class WanBlock:
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Tensor) -> Tensor:
        if not (takes(hidden_states) and temb.dim() in (3, 4) and _has_own_norms(self)):
            return super().forward(hidden_states, encoder_hidden_states, temb, rotary_emb)
        return _transform(self, hidden_states, encoder_hidden_states, temb, rotary_emb)


def _vace_mismatch(block: nn.Module) -> Optional[str]:
    for projection in (block.proj_in, block.proj_out):
        if not (projection is None or isinstance(projection, nn.Module)):
            return "its projections are not modules"
    return _block_mismatch(block)


@replaces(
    "diffusers.models.transformers.transformer_wan_vace.WanVACETransformerBlock",
    does="LayerNorm with modulation, and residual sums with gates and norms",
    kernels=("adaln",),
    mismatch=_vace_mismatch,
)
class WanVACEBlock:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        control_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: Tensor,
    ) -> tuple[Optional[Tensor], Tensor]:
        control = control_hidden_states
        if not (takes(control) and temb.dim() == 3 and _has_own_norms(self)):
            return super().forward(hidden_states, encoder_hidden_states, control, temb, rotary_emb)
        if self.proj_in is not None:
            control = self.proj_in(control) + hidden_states
        control = _transform(self, control, encoder_hidden_states, temb, rotary_emb)
        return None if self.proj_out is None else self.proj_out(control), control


def _has_own_norms(block: nn.Module) -> bool:
    cls = diffusers_norms().FP32LayerNorm
    return is_own(block.norm1, cls) and is_own(block.norm2, cls, nn.Identity) and is_own(block.norm3, cls)


def _transform(block: nn.Module, x: Tensor, context: Tensor, temb: Tensor, rotary: Any) -> Tensor:
    """Return what a block makes of `x`, for `temb` of [batch, 6, channels] or [batch, tokens, 6, channels]."""
    # Float32 as in the model, but without a float32 copy of temb: the table is small.
    modulation = block.scale_shift_table.to(temb.device, torch.float32) + temb
    shift1, scale1, gate1, shift3, scale3, gate3 = modulation.unbind(-2)
    norm1, norm2, norm3 = block.norm1, block.norm2, block.norm3
    normed = adaln.ada_layer_norm(x, scale1, shift1, eps=norm1.eps)
    attended = block.attn1(normed, None, None, rotary)
    if isinstance(norm2, nn.Identity):
        x = normed = adaln.gate_residual(x, attended, gate1)
    else:
        weight, bias = weight_for(norm2.weight, x), weight_for(norm2.bias, x)
        x, normed = adaln.gate_residual_ada_norm(x, attended, gate1, None, None, weight, bias, norm2.eps)
    attended = block.attn2(normed, context, None, None)
    x, normed = adaln.add_ada_norm(x, attended, scale3, shift3, eps=norm3.eps)
    return adaln.gate_residual(x, block.ffn(normed), gate3)


def _attention_mismatch(attention: nn.Module) -> Optional[str]:
    if attention.is_cross_attention:
        return "it is cross-attention, without rotary embedding; its norms are replaced themselves"
    return norms_mismatch("torch.nn.modules.normalization.RMSNorm", attention.norm_q, attention.norm_k)


@replaces(
    "diffusers.models.transformers.transformer_wan.WanAttention",
    "diffusers.models.transformers.transformer_wan_animate.WanAttention",
    "diffusers.models.transformers.transformer_chronoedit.WanAttention",
    does="q and k norms with rotary embedding",
    kernels=("rope3d",),
    mismatch=_attention_mismatch,
    relies_on=("WanAttnProcessor.__call__",),
)
class WanAttention:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        rotary_emb: Optional[tuple[Tensor, Tensor]] = None,
        **kwargs: Any,
    ) -> Tensor:
        x, processor = hidden_states, self.processor
        norm_q, norm_k = self.norm_q, self.norm_k
        if not (
            encoder_hidden_states is None
            and rotary_emb is not None
            and takes(x)
            and not kwargs
            and self.add_k_proj is None
            and type(processor) is library_of(self).WanAttnProcessor
            and are_own_norms(nn.RMSNorm, x.dtype, norm_q, norm_k)
        ):
            return super().forward(x, encoder_hidden_states, attention_mask, rotary_emb, **kwargs)
        if self.fused_projections:
            query, key, value = self.to_qkv(x).chunk(3, dim=-1)
        else:
            query, key, value = self.to_q(x), self.to_k(x), self.to_v(x)
        heads = self.heads
        query, key = rope3d.norm_rotary(
            query,
            key,
            norm_q.weight,
            norm_k.weight,
            *halves(*rotary_emb),
            eps=norm_q.eps,
            norm="token",
            layout="bsc",
            head_dim=query.shape[-1] // heads,
        )
        qkv = heads_of(query, heads), heads_of(key, heads), heads_of(value, heads)
        attended = dispatch_attention(library_of(self), processor, *qkv, attention_mask)
        to_out, dropout = self.to_out
        return dropout(to_out(attended))


def _rotary_mismatch(rotary: nn.Module) -> Optional[str]:
    if len(rotary.patch_size) != 3:
        return "its patches do not have three sizes"
    if not (isinstance(rotary.freqs_cos, Tensor) and isinstance(rotary.freqs_sin, Tensor)):
        return "its frequencies are not tensors"
    return None


@replaces(
    "diffusers.models.transformers.transformer_wan.WanRotaryPosEmbed",
    "diffusers.models.transformers.transformer_wan_animate.WanRotaryPosEmbed",
    does="keeps tables between forwards",
    kernels=(),
    mismatch=_rotary_mismatch,
)
class WanRotary:
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        own = super().forward
        if not takes(hidden_states):
            return own(hidden_states)
        key = hidden_states.shape[2:], tuple(self.patch_size), self.t_dim, self.h_dim, self.w_dim
        return keep_tables(self, key, lambda: own(hidden_states), self.freqs_cos, self.freqs_sin)
