"""Replacements, by library and model. Importing this package registers them all."""

from . import (  # noqa: F401
    diffusers_ltx,
    library_norms,
    torch_norms,
    transformers_attention,
    transformers_layers,
    transformers_mlp,
)
