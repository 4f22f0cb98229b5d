"""The transformer block of SDXL and PixArt in diffusers, which other models have, too.

Known by name: conditions on the kind of the norms are between the sums and the norms.
"""

from typing import Any, Optional

from torch import Tensor, nn

from ..kernel_set import adaln, takes
from ..replacements import original_class, path_of, replaces
from .diffusers_attention import is_layer_norm
from .diffusers_plain_attention import attend


def _mismatch(block: nn.Module) -> Optional[str]:
    if block.norm_type == "layer_norm":
        norms = _norms(block)
    elif block.norm_type == "ada_norm_single":
        norms = block.norm1, block.norm2
        if block.scale_shift_table.dim() != 2 or block.scale_shift_table.shape[0] != 6:
            return "its modulation does not have six parts"
    else:
        return f"there is no faster forward for blocks with {block.norm_type}"
    if block.pos_embed is not None:
        return "it adds positions to its norms"
    if block._chunk_size is not None:
        return "its feed-forward is computed in chunks"
    if not (isinstance(block.only_cross_attention, bool) and isinstance(block.attn1, nn.Module)):
        return "it has no self-attention"
    if not (block.attn2 is None or isinstance(block.attn2, nn.Module)):
        return "its cross-attention is not a module"
    for norm in norms:
        if (
            path_of(original_class(norm)) != "torch.nn.modules.normalization.LayerNorm"
            or len(norm.normalized_shape) != 1
        ):
            return "its norms are not LayerNorms over one dimension"
    return None


def _norms(block: nn.Module) -> tuple[nn.Module, ...]:
    """Return the norms that a block with three LayerNorms computes after residual sums."""
    return (block.norm3,) if block.attn2 is None else (block.norm2, block.norm3)


@replaces(
    "diffusers.models.attention.BasicTransformerBlock",
    does="residual sums with norms, and with modulations and gates if it has them",
    kernels=("adaln",),
    mismatch=_mismatch,
)
class BasicBlock:
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Optional[Tensor] = None,
        encoder_hidden_states: Optional[Tensor] = None,
        encoder_attention_mask: Optional[Tensor] = None,
        timestep: Optional[Tensor] = None,
        cross_attention_kwargs: Optional[dict[str, Any]] = None,
        class_labels: Optional[Tensor] = None,
        added_cond_kwargs: Optional[dict[str, Tensor]] = None,
    ) -> Tensor:
        x, context = hidden_states, encoder_hidden_states
        masks, more = (attention_mask, encoder_attention_mask), cross_attention_kwargs or {}
        if takes(x) and x.dim() == 3 and self._chunk_size is None and not ("gligen" in more or "scale" in more):
            if self.norm_type == "layer_norm":
                if all(is_layer_norm(norm, x.dtype) for norm in _norms(self)):
                    return _transform(self, x, context, masks, more)
            elif (
                self.scale_shift_table.dtype == timestep.dtype == x.dtype
                and is_layer_norm(self.norm1, x.dtype)
                and is_layer_norm(self.norm2, x.dtype)
            ):
                return _transform_modulated(self, x, context, masks, more, timestep)
        return super().forward(
            x,
            attention_mask,
            context,
            encoder_attention_mask,
            timestep,
            cross_attention_kwargs,
            class_labels,
            added_cond_kwargs,
        )


_Masks = tuple[Optional[Tensor], Optional[Tensor]]


def _attend_to_self(
    block: nn.Module, normed: Tensor, context: Optional[Tensor], masks: _Masks, more: dict[str, Any]
) -> Tensor:
    source = context if block.only_cross_attention else None
    return attend(block.attn1, normed, source, masks[0], more)


def _transform(block: nn.Module, x: Tensor, context: Optional[Tensor], masks: _Masks, more: dict[str, Any]) -> Tensor:
    attended = _attend_to_self(block, block.norm1(x), context, masks, more)
    if block.attn2 is not None:
        x, normed = _sum_and_norm(x, attended, block.norm2)
        attended = attend(block.attn2, normed, context, masks[1], more)
    x, normed = _sum_and_norm(x, attended, block.norm3)
    return block.ff(normed) + x


def _sum_and_norm(
    x: Tensor,
    attended: Tensor,
    norm: nn.Module,
    scale: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    gate: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    rounding = "last" if scale is None else "each"
    return adaln.gate_residual_ada_norm(
        x, attended, gate, scale, shift, norm.weight, norm.bias, norm.eps, rounding=rounding
    )


def _transform_modulated(
    block: nn.Module, x: Tensor, context: Optional[Tensor], masks: _Masks, more: dict[str, Any], timestep: Tensor
) -> Tensor:
    table = block.scale_shift_table + timestep.reshape(x.shape[0], 6, -1)
    shift1, scale1, gate1, shift2, scale2, gate2 = table.unbind(1)
    norm1, norm2 = block.norm1, block.norm2
    normed = adaln.ada_layer_norm(x, scale1, shift1, norm1.weight, norm1.bias, norm1.eps, "each")
    attended = _attend_to_self(block, normed, context, masks, more)
    if block.attn2 is None:
        x, normed = _sum_and_norm(x, attended, norm2, scale2, shift2, gate1)
    else:
        x = adaln.gate_residual(x, attended, gate1, "each")
        attended = attend(block.attn2, x, context, masks[1], more)
        x, normed = _sum_and_norm(x, attended, norm2, scale2, shift2)
    return adaln.gate_residual(x, block.ff(normed), gate2, "each")
