"""The naive kernel of `ada_layer_norm`, forward: see adaln.cu."""

from ._ops import ops

ada_layer_norm = ops.ada_layer_norm.default

__all__ = ["ada_layer_norm"]
