"""LTX-Video in diffusers."""

from typing import Optional

from torch import Tensor, nn

from ..kernel_set import adaln, takes
from ..replacements import is_own, original_class, replaces

_NORM = "diffusers.models.normalization.RMSNorm"


def _block_mismatch(block: nn.Module) -> Optional[str]:
    for norm in (block.norm1, block.norm2):
        if original_class(norm).__name__ != "RMSNorm" or norm.weight is not None:
            return "its norms are not RMSNorms without weight"
    if tuple(block.scale_shift_table.shape[:1]) != (6,):
        return "its modulation does not have six parts"
    return None


@replaces(
    "diffusers.models.transformers.transformer_ltx.LTXVideoTransformerBlock",
    does="RMSNorm with modulation, and residual sums with gates",
    mismatch=_block_mismatch,
)
class LTXBlock:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Optional[tuple[Tensor, Tensor]] = None,
        encoder_attention_mask: Optional[Tensor] = None,
    ) -> Tensor:
        x = hidden_states
        norm1, norm2 = self.norm1, self.norm2
        if not (takes(x) and is_own(norm1, _NORM) and is_own(norm2, _NORM)):
            return super().forward(x, encoder_hidden_states, temb, image_rotary_emb, encoder_attention_mask)
        table = self.scale_shift_table[None, None] + temb.unflatten(-1, (6, -1))
        shift1, scale1, gate1, shift2, scale2, gate2 = table.unbind(2)
        normed = adaln.ada_rms_norm(x, scale1, shift1, eps=norm1.eps, rounding="each")
        attended = self.attn1(hidden_states=normed, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb)
        x = adaln.gate_residual(x, attended, gate1, rounding="each")
        attended = self.attn2(
            x, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask, image_rotary_emb=None
        )
        x = x + attended
        normed = adaln.ada_rms_norm(x, scale2, shift2, eps=norm2.eps, rounding="each")
        return adaln.gate_residual(x, self.ff(normed), gate2, rounding="each")
