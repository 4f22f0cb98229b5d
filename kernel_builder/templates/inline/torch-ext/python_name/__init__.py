"""The operators of $name."""

from ._ops import ops

$assign

__all__ = [$names]
