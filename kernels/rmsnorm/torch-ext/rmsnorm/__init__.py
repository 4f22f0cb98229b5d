"""RMSNorm, and fused residual add and RMSNorm, forward and backward."""

from . import layers
from .norm import add_rms_norm, add_rms_norm_, rms_norm

__all__ = ["add_rms_norm", "add_rms_norm_", "layers", "rms_norm"]
