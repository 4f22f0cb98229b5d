"""The operators of $name."""

from .op import $imported

__all__ = [$names]
