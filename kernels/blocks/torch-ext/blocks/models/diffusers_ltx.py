"""LTX-Video in diffusers.

Its attention is known by name: the processor rotates under a condition, after the norms. The rotary embedding is known
by name because its tables may be kept: that it makes the same ones for the same sizes cannot be probed.
"""

from typing import Any, Optional, Union

from torch import Tensor, nn

from ..kernel_set import rope3d, takes
from ..replacements import replaces
from ..rotary_tables import halves, keep_tables, with_halves
from .diffusers_attention import (
    are_own_norms,
    dispatch_attention,
    heads_of,
    library_of,
    mask_of_heads,
    norms_mismatch,
)


def _attention_mismatch(attention: nn.Module) -> Optional[str]:
    return norms_mismatch("torch.nn.modules.normalization.RMSNorm", attention.norm_q, attention.norm_k)


@replaces(
    "diffusers.models.transformers.transformer_ltx.LTXAttention",
    does="q and k norms with rotary embedding",
    kernels=("rope3d",),
    mismatch=_attention_mismatch,
    relies_on=("LTXVideoAttnProcessor.__call__", "apply_rotary_emb"),
)
class LTXAttention:
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        image_rotary_emb: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> Tensor:
        x, context, processor = hidden_states, encoder_hidden_states, self.processor
        norm_q, norm_k = self.norm_q, self.norm_k
        if not (
            takes(x)
            and not kwargs
            and type(processor) is library_of(self).LTXVideoAttnProcessor
            and (context is None or image_rotary_emb is None)
            and are_own_norms(nn.RMSNorm, x.dtype, norm_q, norm_k)
        ):
            return super().forward(x, context, attention_mask, image_rotary_emb, **kwargs)
        source = x if context is None else context
        query, key, value = self.to_q(x), self.to_k(source), self.to_v(source)
        if image_rotary_emb is None:
            query, key = norm_q(query), norm_k(key)
        else:
            tables = halves(*image_rotary_emb)
            options = {"eps": norm_q.eps, "norm": "token", "layout": "bsc"}
            query, key = rope3d.norm_rotary(query, key, norm_q.weight, norm_k.weight, *tables, **options)
        heads = self.heads
        qkv = heads_of(query, heads), heads_of(key, heads), heads_of(value, heads)
        attended = dispatch_attention(library_of(self), processor, *qkv, mask_of_heads(self, attention_mask, source))
        to_out, dropout = self.to_out
        return dropout(to_out(attended))


def _rotary_mismatch(rotary: nn.Module) -> Optional[str]:
    sizes = (rotary.base_num_frames, rotary.base_height, rotary.base_width, rotary.patch_size, rotary.patch_size_t)
    numbers = (rotary.dim, rotary.theta, *sizes)
    return None if all(isinstance(number, (int, float)) for number in numbers) else "its sizes are not numbers"


@replaces(
    "diffusers.models.transformers.transformer_ltx.LTXVideoRotaryPosEmbed",
    does="keeps tables between forwards",
    kernels=(),
    mismatch=_rotary_mismatch,
)
class LTXRotary:
    def forward(
        self,
        hidden_states: Tensor,
        num_frames: Optional[int] = None,
        height: Optional[int] = None,
        width: Optional[int] = None,
        rope_interpolation_scale: Optional[tuple[Union[Tensor, float], float, float]] = None,
        video_coords: Optional[Tensor] = None,
    ) -> tuple[Tensor, Tensor]:
        x, scale = hidden_states, rope_interpolation_scale
        arguments = num_frames, height, width, scale, video_coords
        if not takes(x):
            return super().forward(x, *arguments)
        # The values of tensors may change.
        if video_coords is not None or not (scale is None or _are_numbers(scale)):
            return with_halves(*super().forward(x, *arguments))
        batch, sample = x.shape[0], x[:1]
        sizes = self.base_num_frames, self.base_height, self.base_width, self.patch_size, self.patch_size_t
        axes = num_frames, height, width, None if scale is None else tuple(scale)
        key = x.device, batch, axes, self.dim, self.theta, sizes
        own = super().forward
        return keep_tables(self, key, lambda: _repeat(*own(sample, *arguments), batch))


def _are_numbers(scale: Any) -> bool:
    return isinstance(scale, (tuple, list)) and all(isinstance(number, (int, float)) for number in scale)


def _repeat(cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    return cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
