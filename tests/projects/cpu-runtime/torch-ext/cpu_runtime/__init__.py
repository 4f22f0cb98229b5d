"""The C++ library, exceptions and OpenMP in a kernel, for tests."""

from ._ops import ops

__all__ = ["ops"]
