"""Rotary embeddings of diffusers that make the same tables at each step of a pipeline.

Known by name: that tables of the same sizes are the same cannot be probed.
"""

from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..kernel_set import DEVICE, takes
from ..replacements import replaces
from ..rotary_tables import Tables, keep_tables, with_halves, with_parts

_LIBRARY = "diffusers.models.transformers"


def _mismatch(*names: str) -> Any:
    """Return a function that says why the attributes of a module cannot be a key of its tables."""

    def mismatch(rotary: nn.Module) -> Optional[str]:
        values = [getattr(rotary, name) for name in names]
        return None if _key_of(values) is not None else "its sizes are not numbers"

    return mismatch


def _key_of(value: Any) -> Any:
    """Return nested lists of numbers as nested tuples, or None if there is something else in them."""
    if isinstance(value, (int, float, str)):
        return value
    if not isinstance(value, (list, tuple)):
        return None
    parts = tuple(_key_of(part) for part in value)
    return None if None in parts else parts


_OF_WAN = ("patch_size", "t_dim", "h_dim", "w_dim")


@replaces(
    f"{_LIBRARY}.transformer_wan.WanRotaryPosEmbed",
    f"{_LIBRARY}.transformer_wan_animate.WanRotaryPosEmbed",
    does="keeps tables between forwards",
    kernels=(),
    mismatch=_mismatch(*_OF_WAN),
)
class WanRotary:
    def forward(self, hidden_states: Tensor) -> Tables:
        own = super().forward
        sources = self.freqs_cos, self.freqs_sin
        if not (takes(hidden_states) and all(isinstance(source, Tensor) for source in sources)):
            return own(hidden_states)
        key = hidden_states.shape[2:], _key_of([getattr(self, name) for name in _OF_WAN])
        return keep_tables(self, key, lambda: own(hidden_states), *sources)


_OF_HUNYUAN = ("patch_size", "patch_size_t", "rope_dim", "theta")


@replaces(
    f"{_LIBRARY}.transformer_hunyuan_video.HunyuanVideoRotaryPosEmbed",
    does="keeps tables between forwards",
    kernels=(),
    mismatch=_mismatch(*_OF_HUNYUAN),
)
class HunyuanVideoRotary:
    def forward(self, hidden_states: Tensor) -> Tables:
        own = super().forward
        if not takes(hidden_states):
            return own(hidden_states)
        sizes = _key_of([getattr(self, name) for name in _OF_HUNYUAN])
        return keep_tables(self, (hidden_states.device, hidden_states.shape[2:], sizes), lambda: own(hidden_states))


_OF_LTX = ("dim", "theta", "base_num_frames", "base_height", "base_width", "patch_size", "patch_size_t")


@replaces(
    f"{_LIBRARY}.transformer_ltx.LTXVideoRotaryPosEmbed",
    does="keeps tables between forwards",
    kernels=(),
    mismatch=_mismatch(*_OF_LTX),
)
class LTXRotary:
    def forward(
        self,
        hidden_states: Tensor,
        num_frames: Optional[int] = None,
        height: Optional[int] = None,
        width: Optional[int] = None,
        rope_interpolation_scale: Optional[tuple[Any, float, float]] = None,
        video_coords: Optional[Tensor] = None,
    ) -> Tables:
        own, x, scale = super().forward, hidden_states, rope_interpolation_scale
        arguments = num_frames, height, width, scale, video_coords
        if not takes(x):
            return own(x, *arguments)
        axes = _key_of([num_frames, height, width, 0 if scale is None else scale])
        if video_coords is not None or axes is None:  # the values of tensors may change
            return with_halves(*own(x, *arguments))
        key = x.device, x.shape[0], axes, scale is None, _key_of([getattr(self, name) for name in _OF_LTX])
        return keep_tables(self, key, lambda: _repeated(*own(x[:1], *arguments), x.shape[0]))


def _repeated(cos: Tensor, sin: Tensor, batch: int) -> Tables:
    return cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)


def _kept(rotary: nn.Module, make: Any, video: Any, device: Optional[torch.device], tokens: Any) -> Tables:
    """Return the complex rotations that `make` returns for the tokens of the image and of the text."""
    sizes = _key_of([video, "" if tokens is None else tokens])
    if is_compiling() or sizes is None or device is None or torch.device(device).type != DEVICE:
        return make()
    frequencies = rotary.pos_freqs, rotary.neg_freqs
    key = torch.device(device), sizes, _key_of([rotary.axes_dim, rotary.scale_rope])
    return keep_tables(rotary, key, make, *frequencies, prepare=with_parts)


def _qwen_image_mismatch(rotary: nn.Module) -> Optional[str]:
    if not all(isinstance(f, Tensor) and f.is_complex() for f in (rotary.pos_freqs, rotary.neg_freqs)):
        return "its frequencies are not complex tensors"
    return _mismatch("axes_dim", "scale_rope")(rotary)


@replaces(
    f"{_LIBRARY}.transformer_qwenimage.QwenEmbedRope",
    does="keeps tables between forwards",
    kernels=(),
    mismatch=_qwen_image_mismatch,
)
class QwenImageRotary:
    def forward(
        self, video_fhw: Any, device: Optional[torch.device] = None, max_txt_seq_len: Optional[int] = None
    ) -> Tables:
        own = super().forward
        return _kept(self, lambda: own(video_fhw, device, max_txt_seq_len), video_fhw, device, max_txt_seq_len)


@replaces(
    f"{_LIBRARY}.transformer_qwenimage.QwenEmbedLayer3DRope",
    does="keeps tables between forwards",
    kernels=(),
    mismatch=_qwen_image_mismatch,
)
class QwenImageLayeredRotary:
    def forward(self, video_fhw: Any, max_txt_seq_len: int, device: Optional[torch.device] = None) -> Tables:
        own = super().forward
        return _kept(self, lambda: own(video_fhw, max_txt_seq_len, device), video_fhw, device, max_txt_seq_len)
