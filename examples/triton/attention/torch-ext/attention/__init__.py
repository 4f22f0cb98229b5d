"""Attention without the matrix of scores in memory."""

from .kernels import attention

__all__ = ["attention"]
