"""The kernels of one decoding step of a language model: linear layers of few rows, and attention of one token."""

from .linear_layers import gated_linear, linear, linears
from .token_attention import attention

__all__ = ["attention", "gated_linear", "linear", "linears"]
