"""ReLU with forward and backward kernels."""

from . import layers
from .op import relu

__all__ = ["layers", "relu"]
