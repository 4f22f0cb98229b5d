"""Replacements by name. Importing this package registers them all."""

from . import diffusers_rotary, transformers_masks  # noqa: F401
