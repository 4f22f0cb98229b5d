"""The C++ library, exceptions and OpenMP in a kernel, for tests."""

from ._ops import ops

library = ops.library
exceptions = ops.exceptions
threads = ops.threads

__all__ = ["exceptions", "library", "threads"]
