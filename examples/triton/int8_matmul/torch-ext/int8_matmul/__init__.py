"""Linear layers with int8 weights."""

from .kernels import int8_linear

__all__ = ["int8_linear"]
