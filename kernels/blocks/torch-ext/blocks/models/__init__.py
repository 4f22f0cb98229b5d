"""Replacements, by library and model. Importing this package registers them all."""

from . import diffusers_ltx, library_norms, torch_norms  # noqa: F401
