"""RMSNorm of rows, and a scaled sum."""

from .kernels import add_scaled, rms_norm

__all__ = ["add_scaled", "rms_norm"]
