"""Stable Diffusion 3 and 3.5 in diffusers.

Known by name: the second attention is computed, under a condition, between a sum and its norm; and for both attentions
one norm is modulated twice, where two kernels read less than a norm and what modulates it.
"""

from typing import Any, Optional

from torch import Tensor, nn

from ..kernel_set import adaln, takes
from ..replacements import replaces
from .diffusers_attention import (
    ada_norms_mismatch,
    are_own,
    plain_layer_norms_mismatch,
    projections_mismatch,
    transformed,
)
from .diffusers_plain_attention import attend_jointly


def _joint_block_mismatch(block: nn.Module) -> Optional[str]:
    if block._chunk_size is not None:
        return "its feed-forward is computed in chunks"
    first = "SD35AdaLayerNormZeroX" if block.use_dual_attention else "AdaLayerNormZero"
    if block.context_pre_only:
        of_context, norms = "AdaLayerNormContinuous", (block.norm2,)
    else:
        of_context, norms = "AdaLayerNormZero", (block.norm2, block.norm2_context)
    return (
        plain_layer_norms_mismatch(*norms)
        or ada_norms_mismatch(first, block.norm1)
        or ada_norms_mismatch(of_context, block.norm1_context)
    )


@replaces(
    "diffusers.models.normalization.SD35AdaLayerNormZeroX",
    does="LayerNorm with two modulations",
    kernels=("adaln",),
    mismatch=lambda module: plain_layer_norms_mismatch(module.norm) or projections_mismatch(module.linear, module.silu),
)
class SD35AdaLayerNormZeroX:
    def forward(self, hidden_states: Tensor, emb: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        x, eps = hidden_states, self.norm.eps
        if not (takes(x) and x.dim() == 3 and are_own(nn.LayerNorm, self.norm) and emb.dtype == x.dtype):
            return super().forward(x, emb)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp, shift2, scale2, gate2 = self.linear(self.silu(emb)).chunk(
            9, dim=1
        )
        normed = adaln.ada_layer_norm(x, scale, shift, eps=eps, rounding="each")
        normed2 = adaln.ada_layer_norm(x, scale2, shift2, eps=eps, rounding="each")
        return normed, gate, shift_mlp, scale_mlp, gate_mlp, normed2, gate2


@replaces(
    "diffusers.models.attention.JointTransformerBlock",
    does="residual sums with gates and norms",
    kernels=("adaln",),
    mismatch=_joint_block_mismatch,
    relies_on=("Attention.forward", "JointAttnProcessor2_0.__call__"),
)
class JointBlock:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        joint_attention_kwargs: Optional[dict[str, Any]] = None,
    ) -> tuple[Optional[Tensor], Tensor]:
        x, context, more = hidden_states, encoder_hidden_states, joint_attention_kwargs
        norms = (self.norm2,) if self.context_pre_only else (self.norm2, self.norm2_context)
        if not (
            takes(x)
            and temb.dtype == context.dtype == x.dtype
            and self._chunk_size is None
            and are_own(nn.LayerNorm, *norms)
        ):
            return super().forward(x, context, temb, more)
        more = more or {}
        normed, *modulation = self.norm1(x, emb=temb)
        if self.context_pre_only:
            normed_context, context_modulation = self.norm1_context(context, temb), None
        else:
            normed_context, *context_modulation = self.norm1_context(context, emb=temb)
        attended, attended_context = attend_jointly(self.attn, normed, normed_context, more)
        if self.use_dual_attention:
            gate, *modulation, normed2, gate2 = modulation
            x = adaln.gate_residual(x, attended, gate, rounding="each")
            attended, _ = attend_jointly(self.attn2, normed2, None, more)
            modulation = gate2, *modulation
        x = transformed(x, attended, self.norm2, self.ff, modulation)
        if context_modulation is None:
            return None, x
        return transformed(context, attended_context, self.norm2_context, self.ff_context, context_modulation), x
