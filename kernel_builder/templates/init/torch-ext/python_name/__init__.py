"""${title}, with forward and backward kernels."""

from . import layers
from .op import ${operator}

__all__ = ["layers", "${operator}"]
