"""Replacements, by library and model. Importing this package registers them all."""

from . import (  # noqa: F401
    diffusers_attention,
    diffusers_basic_block,
    diffusers_cogvideox,
    diffusers_flux,
    diffusers_flux2,
    diffusers_hunyuan_video,
    diffusers_ltx,
    diffusers_qwen_image,
    diffusers_sd3,
    diffusers_wan,
    transformers_masks,
)
