"""`softmax`, with forward and backward kernels."""

from . import layers
from .op import softmax

__all__ = ["layers", "softmax"]
