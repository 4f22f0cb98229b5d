"""Qwen-Image in diffusers.

Known by name: a method of the block modulates what the block has normalized, and the processor joins both streams after
rotating them. That tables may be kept cannot be probed.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..kernel_set import DEVICE, adaln, takes
from ..replacements import is_own, original_class, path_of, replaces
from ..rotary_tables import keep_tables, parts, with_parts
from .diffusers_attention import (
    are_own,
    are_own_norms,
    diffusers_norms,
    dispatch_attention,
    joined_heads,
    library_of,
    norms_mismatch,
    plain_layer_norms_mismatch,
    rotated_heads,
    transformed,
    within_float16,
)

_ATTENTION = "diffusers.models.attention_processor.Attention"

_BothStreams = tuple[Tensor, Tensor]


def _block_mismatch(block: nn.Module) -> Optional[str]:
    attention = block.attn
    if path_of(original_class(attention)) != _ATTENTION:
        return f"its attention is not {_ATTENTION}"
    if not all(isinstance(module, nn.Module) for module in (attention.to_out, attention.to_add_out)):
        return "its attention does not project both streams"
    if not (isinstance(block.zero_cond_t, bool) and isinstance(attention.inner_dim, int)):
        return "its sizes are not numbers"
    return plain_layer_norms_mismatch(
        block.img_norm1, block.img_norm2, block.txt_norm1, block.txt_norm2
    ) or norms_mismatch("diffusers.models.normalization.RMSNorm", *_norms(attention))


def _norms(attention: nn.Module) -> tuple[nn.Module, ...]:
    return attention.norm_q, attention.norm_k, attention.norm_added_q, attention.norm_added_k


@replaces(
    "diffusers.models.transformers.transformer_qwenimage.QwenImageTransformerBlock",
    does="LayerNorm with modulation, residual sums with gates and norms, q and k norms with rotary embedding",
    kernels=("adaln", "rope3d"),
    mismatch=_block_mismatch,
    relies_on=(
        "Attention.forward",
        "QwenDoubleStreamAttnProcessor2_0.__call__",
        "QwenImageTransformerBlock._modulate",
        "apply_rotary_emb_qwen",
    ),
)
class QwenImageBlock:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor,
        temb: Tensor,
        image_rotary_emb: Optional[_BothStreams] = None,
        joint_attention_kwargs: Optional[dict[str, Any]] = None,
        modulate_index: Optional[list[int]] = None,
    ) -> _BothStreams:
        x, context, mask = hidden_states, encoder_hidden_states, encoder_hidden_states_mask
        rotary, more, index = image_rotary_emb, joint_attention_kwargs, modulate_index
        norms = self.img_norm1, self.img_norm2, self.txt_norm1, self.txt_norm2
        if not (takes(x) and temb.dtype == context.dtype == x.dtype and are_own(nn.LayerNorm, *norms)):
            return super().forward(x, context, mask, temb, rotary, more, index)
        shift, scale, *modulation = _modulation(self.img_mod(temb), index)
        if self.zero_cond_t:
            temb = temb.chunk(2, dim=0)[0]
        c_shift, c_scale, *context_modulation = _modulation(self.txt_mod(temb))
        normed = adaln.ada_layer_norm(x, scale, shift, eps=self.img_norm1.eps, rounding="each")
        normed_context = adaln.ada_layer_norm(context, c_scale, c_shift, eps=self.txt_norm1.eps, rounding="each")
        if not more and _has_own_attention(self, x.dtype, rotary):
            attended, attended_context = _attend_to_both(self, normed, normed_context, mask, rotary)
        else:
            attended, attended_context = self.attn(
                hidden_states=normed,
                encoder_hidden_states=normed_context,
                encoder_hidden_states_mask=mask,
                image_rotary_emb=rotary,
                **(more or {}),
            )
        x = transformed(x, attended, self.img_norm2, self.img_mlp, modulation)
        context = transformed(context, attended_context, self.txt_norm2, self.txt_mlp, context_modulation)
        return within_float16(context), within_float16(x)


def _modulation(projected: Tensor, index: Optional[Tensor] = None) -> tuple[Tensor, ...]:
    """Return shift, scale and gate of the attention, and of the feed-forward.

    Args:
        projected: `[batch, 6 * channels]`, or with `index` `[2 * batch, 6 * channels]`.
        index: `[batch, tokens]`. Tokens of 0 get the modulation in the first half of `projected`, others the second.
    """
    if index is not None:
        first, second = projected[:, None].chunk(2, dim=0)
        projected = torch.where(index[..., None] == 0, first, second)
    return projected.chunk(6, dim=-1)


def _has_own_attention(block: nn.Module, dtype: torch.dtype, rotary: Optional[_BothStreams]) -> bool:
    attention, library = block.attn, library_of(block)
    return (
        rotary is not None
        and all(freqs.is_complex() for freqs in rotary)
        and is_own(attention, library.Attention)
        and type(attention.processor) is library.QwenDoubleStreamAttnProcessor2_0
        and are_own_norms(diffusers_norms().RMSNorm, dtype, *_norms(attention))
    )


def _attend_to_both(
    block: nn.Module, x: Tensor, context: Tensor, mask: Optional[Tensor], rotary: _BothStreams
) -> _BothStreams:
    """Return the attention of both streams to both, projected."""
    attention = block.attn
    head_dim, (of_x, of_context) = attention.inner_dim // attention.heads, rotary
    if mask is not None:
        mask = torch.cat((mask, mask.new_ones(x.shape[:2])), dim=1)[:, None, None]
    projected = attention.to_q(x), attention.to_k(x), attention.to_v(x)
    norms = attention.norm_q, attention.norm_k
    heads = rotated_heads(projected, norms, parts(of_x), head_dim, "before_weight")
    projected = attention.add_q_proj(context), attention.add_k_proj(context), attention.add_v_proj(context)
    norms = attention.norm_added_q, attention.norm_added_k
    context_heads = rotated_heads(projected, norms, parts(of_context), head_dim, "before_weight")
    heads = joined_heads(context_heads, heads)
    attended = dispatch_attention(library_of(block), attention.processor, *heads, mask)
    attended_context, attended = attended.split((context.shape[1], x.shape[1]), dim=1)
    # A projection copies what is not contiguous, and then adds its bias in a kernel of its own.
    to_out, *others = attention.to_out
    attended = to_out(attended.contiguous())
    for dropout in others:
        attended = dropout(attended)
    return attended, attention.to_add_out(attended_context.contiguous())


def _rotary_mismatch(rotary: nn.Module) -> Optional[str]:
    for frequencies in (rotary.pos_freqs, rotary.neg_freqs):
        if not (isinstance(frequencies, Tensor) and frequencies.is_complex()):
            return "its frequencies are not complex tensors"
    if not (isinstance(rotary.scale_rope, bool) and all(isinstance(size, int) for size in rotary.axes_dim)):
        return "its sizes are not numbers"
    return None


@replaces(
    "diffusers.models.transformers.transformer_qwenimage.QwenEmbedRope",
    does="keeps tables between forwards",
    kernels=(),
    mismatch=_rotary_mismatch,
)
class QwenImageRotary:
    def forward(
        self, video_fhw: Any, device: Optional[torch.device] = None, max_txt_seq_len: Optional[int] = None
    ) -> _BothStreams:
        own = super().forward
        return _kept(self, lambda: own(video_fhw, device, max_txt_seq_len), video_fhw, device, max_txt_seq_len)


@replaces(
    "diffusers.models.transformers.transformer_qwenimage.QwenEmbedLayer3DRope",
    does="keeps tables between forwards",
    kernels=(),
    mismatch=_rotary_mismatch,
)
class QwenImageLayeredRotary:
    def forward(self, video_fhw: Any, max_txt_seq_len: int, device: Optional[torch.device] = None) -> _BothStreams:
        own = super().forward
        return _kept(self, lambda: own(video_fhw, max_txt_seq_len, device), video_fhw, device, max_txt_seq_len)


def _kept(
    rotary: nn.Module, make: Callable[[], _BothStreams], video: Any, device: Optional[torch.device], tokens: Any
) -> _BothStreams:
    """Return the complex rotations that `make` returns for the tokens of the image and of the text."""
    sizes = _sizes((video, tokens))
    if is_compiling() or sizes is None or device is None or torch.device(device).type != DEVICE:
        return make()
    key = torch.device(device), sizes, tuple(rotary.axes_dim), rotary.scale_rope
    return keep_tables(rotary, key, make, rotary.pos_freqs, rotary.neg_freqs, prepare=with_parts)


def _sizes(value: Any) -> Any:
    """Return nested lists of numbers as nested tuples, or None if there is something else in them."""
    if type(value) is int:
        return value
    if not isinstance(value, (list, tuple)):
        return None
    sizes = tuple(_sizes(part) for part in value)
    return None if None in sizes else sizes
