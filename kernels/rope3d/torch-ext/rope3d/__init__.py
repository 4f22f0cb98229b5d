"""Rotary position embedding on three axes, and by given tables, alone and with RMSNorm, forward and backward."""

from .normed import norm_rotary
from .rotary import apply_rotary, rope3d

__all__ = ["apply_rotary", "norm_rotary", "rope3d"]
