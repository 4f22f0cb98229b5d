"""Rotary position embedding on three axes, and by given tables, forward and backward."""

from .rotary import apply_rotary, rope3d

__all__ = ["apply_rotary", "rope3d"]
