"""Small random image models of diffusers, with inputs for them."""

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from model_cases import Case, randomized

BATCH, HEIGHT, WIDTH = 2, 4, 6
TOKENS = HEIGHT * WIDTH
HEADS, HEAD_DIM = 2, 32
WIDE = HEADS * HEAD_DIM
TEXT = 7
SIZES = {"in_channels": 8, "num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM, "num_layers": 2}


def flux(**options: Any) -> Case:
    model = FluxTransformer2DModel(
        **SIZES,
        num_single_layers=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(8, 12, 12),
        **options,
    )
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, 8),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
        "pooled_projections": torch.randn(BATCH, 8),
        "timestep": torch.rand(BATCH),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(1.0 * HEIGHT), torch.arange(1.0 * WIDTH)),
        "txt_ids": torch.zeros(TEXT, 3),
        "return_dict": False,
    }
    return Case(randomized(model), inputs, ("timestep", "img_ids", "txt_ids"))


CASES = {"Flux.1": flux}
