"""Small random image models of diffusers, with inputs for them."""

from typing import Any

import torch
from diffusers import Flux2Transformer2DModel, FluxTransformer2DModel, QwenImageTransformer2DModel
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


def flux2(**options: Any) -> Case:
    model = Flux2Transformer2DModel(
        **SIZES,
        num_single_layers=2,
        joint_attention_dim=16,
        timestep_guidance_channels=16,
        axes_dims_rope=(8, 8, 8, 8),
        **options,
    )
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, 8),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
        "timestep": torch.rand(BATCH),
        "img_ids": torch.cartesian_prod(*(torch.arange(size) for size in (1, HEIGHT, WIDTH, 1))),
        "txt_ids": torch.cartesian_prod(*(torch.arange(size) for size in (1, 1, 1, TEXT))),
        "guidance": torch.full((BATCH,), 4.0),
        "return_dict": False,
    }
    return Case(randomized(model), inputs, ("timestep", "guidance"))


def qwen_image(masked: bool = False, edited: bool = False, layered: bool = False) -> Case:
    model = QwenImageTransformer2DModel(
        **SIZES,
        out_channels=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 12, 12),
        zero_cond_t=edited,
        use_layer3d_rope=layered,
    )
    shapes = [(1, HEIGHT // 2, WIDTH), (1, HEIGHT // 2, WIDTH)] if edited or layered else [(1, HEIGHT, WIDTH)]
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, 8),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
        "timestep": torch.rand(BATCH),
        "img_shapes": [shapes] * BATCH,
        "return_dict": False,
    }
    if masked:
        inputs["encoder_hidden_states_mask"] = torch.arange(TEXT) < torch.tensor([[TEXT], [4]])
    return Case(randomized(model), inputs, ("timestep",))


def fused(case: Case) -> Case:
    case.model.fuse_qkv_projections()
    return case


CASES = {
    "Flux.1": flux,
    "Flux.1, fused projections": lambda: fused(flux()),
    "Flux.2": flux2,
    "Flux.2, fused projections": lambda: fused(flux2()),
    "Qwen-Image": qwen_image,
    "Qwen-Image, mask": lambda: qwen_image(masked=True),
    "Qwen-Image, edited": lambda: qwen_image(edited=True),
    "Qwen-Image, layers": lambda: qwen_image(layered=True),
}
