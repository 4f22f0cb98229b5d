"""Replacements, by library and model. Importing this package registers them all."""

from . import diffusers_feed_forward, diffusers_ltx, torch_norms  # noqa: F401
