"""GEGLU, of the halves of one tensor or of two tensors, forward and backward."""

from . import layers
from .gated import geglu, geglu_pair

__all__ = ["geglu", "geglu_pair", "layers"]
