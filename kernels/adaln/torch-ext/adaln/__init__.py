"""Modulated norms and gated residuals of diffusion transformers, forward and backward."""

from . import layers
from .norm import ada_layer_norm, ada_rms_norm, add_ada_norm, gate_residual, gate_residual_ada_norm

__all__ = ["ada_layer_norm", "ada_rms_norm", "add_ada_norm", "gate_residual", "gate_residual_ada_norm", "layers"]
