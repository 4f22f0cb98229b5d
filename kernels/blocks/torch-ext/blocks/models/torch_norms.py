"""Norms of Torch."""

from typing import Optional

import torch
from torch import Tensor, nn

from ..kernel_set import adaln, rmsnorm, takes
from ..replacements import replaces


def one_dimension(norm: nn.Module) -> Optional[str]:
    """Return why the kernels cannot compute a norm over `normalized_shape`, or None."""
    return None if len(norm.normalized_shape) == 1 else "it normalizes over several dimensions"


def takes_rows(x: Tensor, width: int) -> bool:
    """Return whether the kernels should normalize `x` over its last dimension, of `width` elements, now.

    Not if the elements of a row are apart, as in VAEs, which normalize a transposed tensor: the kernels copy it, and
    change the memory format for the convolution that follows.
    """
    return takes(x) and x.shape[-1] == width and x.stride(-1) == 1


def weight_for(parameter: Optional[Tensor], x: Tensor) -> Optional[Tensor]:
    """Return a weight or bias in a dtype that the kernels take beside `x`: that of `x`, or float32."""
    return parameter if parameter is None or parameter.dtype == x.dtype else parameter.float()


@replaces("torch.nn.modules.normalization.RMSNorm", does="RMSNorm", kernels=("rmsnorm",), mismatch=one_dimension)
class TorchRMSNorm:
    def forward(self, x: Tensor) -> Tensor:
        if not takes_rows(x, self.normalized_shape[0]):
            return super().forward(x)
        # Releases of Torch differ in the eps that stands for None: that of x's dtype, or float32's.
        if self.eps is None and x.dtype != torch.float32:
            return super().forward(x)
        if self.weight is not None and self.weight.dtype not in (x.dtype, torch.float32):
            return super().forward(x)
        return rmsnorm.layers.RMSNorm.forward(self, x)


@replaces("torch.nn.modules.normalization.LayerNorm", does="LayerNorm", kernels=("adaln",), mismatch=one_dimension)
class TorchLayerNorm:
    def forward(self, input: Tensor) -> Tensor:
        if not takes_rows(input, self.normalized_shape[0]):
            return super().forward(input)
        return adaln.layers.LayerNorm.forward(self, input)
