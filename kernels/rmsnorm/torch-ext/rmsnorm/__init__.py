"""RMSNorm, and the addition of a residual before it, forward and backward."""

from . import layers
from .norm import add_rms_norm, add_rms_norm_, rms_norm

__all__ = ["add_rms_norm", "add_rms_norm_", "layers", "rms_norm"]
