"""Makes models of diffusers and transformers faster: `accelerate` replaces operations by faster kernels."""

from .acceleration import accelerate, restore
from .comparison import Comparison
from .report import Report

__all__ = ["Comparison", "Report", "accelerate", "restore"]
