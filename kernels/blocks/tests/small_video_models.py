"""Small random video models of diffusers, with inputs for them."""

import importlib
from typing import Any

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from model_cases import Case, randomized
from torch import nn

BATCH, FRAMES, HEIGHT, WIDTH = 2, 2, 4, 4
TOKENS = FRAMES * HEIGHT * WIDTH
HEADS, HEAD_DIM = 2, 32
WIDE = HEADS * HEAD_DIM
TEXT = 7


def ltx(per_token: bool = False, coordinates: bool = False, **options: Any) -> Case:
    model = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=WIDE,
        num_layers=2,
        caption_channels=16,
        **options,
    )
    mask = torch.ones(BATCH, TEXT)
    mask[1, 4:] = 0
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, 8),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
        "timestep": torch.rand(BATCH, TOKENS if per_token else 1) * 900,
        "encoder_attention_mask": mask,
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "rope_interpolation_scale": (0.3, 32, 32),
        "return_dict": False,
    }
    if coordinates:
        inputs["video_coords"] = torch.rand(BATCH, 3, TOKENS) * 100
    return Case(randomized(model), inputs, ("timestep", "video_coords"))


def wan(per_token: bool = False, image: bool = False, **options: Any) -> Case:
    if image:
        options |= {"image_dim": 24, "added_kv_proj_dim": WIDE}
    model = WanTransformer3DModel(**_wan_sizes(), **options)
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, FRAMES, 2 * HEIGHT, 2 * WIDTH),
        "timestep": torch.rand(BATCH, TOKENS) * 900 if per_token else torch.rand(BATCH) * 900,
        # With an image the model takes the last 512 tokens as text.
        "encoder_hidden_states": torch.randn(BATCH, 512 if image else TEXT, 16),
        "return_dict": False,
    }
    if image:
        inputs["encoder_hidden_states_image"] = torch.randn(BATCH, 5, 24)
    return Case(randomized(model), inputs, ("timestep",))


def wan_vace() -> Case:
    model = WanVACETransformer3DModel(**_wan_sizes(), vace_layers=[0, 1], vace_in_channels=4)
    hidden_states = torch.randn(BATCH, 4, FRAMES, 2 * HEIGHT, 2 * WIDTH)
    inputs = {
        "hidden_states": hidden_states,
        "timestep": torch.rand(BATCH) * 900,
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
        "control_hidden_states": torch.randn_like(hidden_states),
        "return_dict": False,
    }
    return Case(randomized(model), inputs, ("timestep",))


def wan_block(name: str) -> Case:
    """Return a block of the model in the module `transformer_{name}`."""
    library = importlib.import_module(f"diffusers.models.transformers.transformer_{name}")
    block = library.WanTransformerBlock(dim=WIDE, ffn_dim=96, num_heads=HEADS, cross_attn_norm=True)
    angles = torch.rand(1, TOKENS, 1, HEAD_DIM // 2).repeat_interleave(2, -1)
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, WIDE),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, WIDE),
        "temb": torch.randn(BATCH, 6, WIDE),
        "rotary_emb": (angles.cos(), angles.sin()),
    }
    return Case(randomized(block), inputs)


def _wan_sizes() -> dict[str, Any]:
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 96, "num_layers": 2}
    return sizes | {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM, "rope_max_seq_len": 16}


def hunyuan_video(**options: Any) -> Case:
    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(8, 12, 12),
        **options,
    )
    mask = torch.ones(BATCH, TEXT, dtype=torch.long)
    mask[1, 4:] = 0
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, FRAMES, 2 * HEIGHT, 2 * WIDTH),
        "timestep": torch.rand(BATCH) * 900,
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(BATCH, 8),
        "guidance": torch.full((BATCH,), 6.0),
        "return_dict": False,
    }
    return Case(randomized(model), inputs, ("timestep",))


def cogvideox(rotary: bool = True) -> Case:
    model = CogVideoXTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=16,
        num_layers=2,
        sample_width=2 * WIDTH,
        sample_height=2 * HEIGHT,
        sample_frames=5,
        max_text_seq_length=TEXT,
        use_rotary_positional_embeddings=rotary,
    )
    inputs = {
        "hidden_states": torch.randn(BATCH, FRAMES, 4, 2 * HEIGHT, 2 * WIDTH),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
        "timestep": torch.randint(0, 900, (BATCH,)),
        "return_dict": False,
    }
    if rotary:
        grid = ((0, 0), (HEIGHT, WIDTH))
        inputs["image_rotary_emb"] = get_3d_rotary_pos_embed(HEAD_DIM, grid, (HEIGHT, WIDTH), FRAMES)
    return Case(randomized(model), inputs)


def wan_fused() -> Case:
    case = wan()
    for block in case.model.blocks:
        block.attn1.fuse_projections()
    return case


def wan_with_other_norms() -> Case:
    case = wan()
    case.model.blocks[0].norm1 = nn.LayerNorm(WIDE, elementwise_affine=False)
    case.model.blocks[0].attn1.norm_q = nn.Identity()
    return case


CASES = {
    "LTX-Video": ltx,
    "LTX-Video, time per token": lambda: ltx(per_token=True),
    "LTX-Video, coordinates": lambda: ltx(coordinates=True),
    "LTX-Video, weights of norms": lambda: ltx(norm_elementwise_affine=True),
    "Wan": wan,
    "Wan, time per token": lambda: wan(per_token=True),
    "Wan, image": lambda: wan(image=True),
    "Wan, no second norm": lambda: wan(cross_attn_norm=False),
    "Wan, fused projections": wan_fused,
    "Wan, other norms": wan_with_other_norms,
    "Wan VACE": wan_vace,
    "block of Wan Animate": lambda: wan_block("wan_animate"),
    "block of ChronoEdit": lambda: wan_block("chronoedit"),
    "HunyuanVideo": hunyuan_video,
    "HunyuanVideo, image": lambda: hunyuan_video(image_condition_type="token_replace"),
    "CogVideoX": cogvideox,
    "CogVideoX, no rotary embedding": lambda: cogvideox(rotary=False),
}
