"""The norms of diffusers that project an embedding to scales, shifts and gates."""

from typing import Optional

import torch
from torch import Tensor, nn

from ..kernel_set import adaln, takes
from ..replacements import is_own, original_class, path_of, replaces

_LAYER_NORM = "torch.nn.modules.normalization.LayerNorm"
_NORMS = (_LAYER_NORM, "diffusers.models.normalization.FP32LayerNorm")


def _mismatch(module: nn.Module) -> Optional[str]:
    norm = module.norm
    if path_of(original_class(norm)) not in _NORMS:
        return "its norm is not a LayerNorm"
    if norm.weight is not None or norm.bias is not None or len(norm.normalized_shape) != 1:
        return "its norm has a weight or bias, or normalizes over several dimensions"
    if not (isinstance(module.linear, nn.Module) and isinstance(module.silu, nn.Module)):
        return "its projection is not a module"
    return None


def _zero_mismatch(module: nn.Module) -> Optional[str]:
    if not (module.emb is None or isinstance(module.emb, nn.Module)):
        return "its embedding is not a module"
    return _mismatch(module)


def _takes(module: nn.Module, x: Tensor) -> bool:
    return takes(x) and x.dim() == 3 and is_own(module.norm, *_NORMS)


@replaces(
    "diffusers.models.normalization.AdaLayerNormZero",
    does="LayerNorm with modulation",
    kernels=("adaln",),
    mismatch=_zero_mismatch,
)
class AdaLayerNormZero:
    def forward(
        self,
        x: Tensor,
        timestep: Optional[Tensor] = None,
        class_labels: Optional[Tensor] = None,
        hidden_dtype: Optional[torch.dtype] = None,
        emb: Optional[Tensor] = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        if not _takes(self, x):
            return super().forward(x, timestep, class_labels, hidden_dtype, emb)
        return adaln.layers.AdaLayerNormZero.forward(self, x, timestep, class_labels, hidden_dtype, emb)


@replaces(
    "diffusers.models.normalization.AdaLayerNormZeroSingle",
    does="LayerNorm with modulation",
    kernels=("adaln",),
    mismatch=_mismatch,
)
class AdaLayerNormZeroSingle:
    def forward(self, x: Tensor, emb: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        if not _takes(self, x):
            return super().forward(x, emb)
        return adaln.layers.AdaLayerNormZeroSingle.forward(self, x, emb)


@replaces(
    "diffusers.models.normalization.AdaLayerNormContinuous",
    does="LayerNorm with modulation",
    kernels=("adaln",),
    mismatch=_mismatch,
)
class AdaLayerNormContinuous:
    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        if not _takes(self, x):
            return super().forward(x, conditioning_embedding)
        return adaln.layers.AdaLayerNormContinuous.forward(self, x, conditioning_embedding)


@replaces(
    "diffusers.models.normalization.SD35AdaLayerNormZeroX",
    does="LayerNorm with two modulations",
    kernels=("adaln",),
    mismatch=_mismatch,
)
class SD35AdaLayerNormZeroX:
    def forward(self, hidden_states: Tensor, emb: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        x, eps = hidden_states, self.norm.eps
        if not (_takes(self, x) and emb.dtype == x.dtype):
            return super().forward(x, emb)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp, shift2, scale2, gate2 = self.linear(self.silu(emb)).chunk(
            9, dim=1
        )
        normed = adaln.ada_layer_norm(x, scale, shift, eps=eps, rounding="each")
        normed2 = adaln.ada_layer_norm(x, scale2, shift2, eps=eps, rounding="each")
        return normed, gate, shift_mlp, scale_mlp, gate_mlp, normed2, gate2
