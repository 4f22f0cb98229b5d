"""Cross entropy of a linear layer's outputs, without all of these outputs in memory."""

from .linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
