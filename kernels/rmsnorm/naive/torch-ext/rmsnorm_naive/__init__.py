"""The naive kernel of `rms_norm`, forward: see rmsnorm.cu."""

from ._ops import ops

rms_norm = ops.rms_norm.default

__all__ = ["rms_norm"]
