"""RMSNorm, and the addition of a residual before it, forward and backward."""

from . import layers
from .norm import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "layers", "rms_norm"]
