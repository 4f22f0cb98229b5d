"""Routing of tokens to experts."""

from .kernels import route

__all__ = ["route"]
