"""GEGLU and SwiGLU of the halves of one tensor or of two tensors, forward and backward."""

from . import layers
from .gated import geglu, geglu_pair, swiglu, swiglu_pair

__all__ = ["geglu", "geglu_pair", "layers", "swiglu", "swiglu_pair"]
