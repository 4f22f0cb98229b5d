"""Small random models of diffusers with inputs for them, by the names of their sizes and inputs."""

import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models import transformers
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_sd3 import SD3SingleTransformerBlock
from model_cases import Case, randomized
from peft import LoraConfig
from torch import nn

BATCH, FRAMES, HEIGHT, WIDTH = 2, 2, 4, 6
TOKENS = HEIGHT * WIDTH
HEADS, HEAD_DIM = 2, 32
WIDE = HEADS * HEAD_DIM
TEXT = 7
IMAGE, VIDEO = (8, 2 * HEIGHT, 2 * WIDTH), (8, FRAMES, 2 * HEIGHT, 2 * WIDTH)
WHOLE = ("timestep", "guidance", "img_ids", "txt_ids", "video_coords", "audio_timestep", "sigma", "audio_sigma")
SIZES = {
    **dict.fromkeys(("in_channels", "out_channels", "pooled_projection_dim", "pos_embed_max_size"), 8),
    **dict.fromkeys(("joint_attention_dim", "caption_channels", "text_embed_dim", "text_dim", "cap_feat_dim"), 16),
    **dict.fromkeys(("context_in_dim", "time_embed_dim", "freq_dim", "sample_size", "rope_max_seq_len"), 16),
    **dict.fromkeys(("num_attention_heads", "num_layers", "num_single_layers", "num_cross_attention_heads"), 2),
    **dict.fromkeys(("num_refiner_layers", "n_refiner_layers", "num_mmdit_layers", "num_single_dit_layers"), 1),
    **dict.fromkeys(("attention_head_dim", "cross_attention_head_dim"), HEAD_DIM),
    **dict.fromkeys(("cross_attention_dim", "caption_projection_dim"), WIDE),
    **dict.fromkeys(("axes_dims_rope", "rope_axes_dim"), (8, 12, 12)),
    "ffn_dim": 96,
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape)


def mask(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(TEXT) < torch.tensor([[TEXT], [4]])).to(dtype)


def case(name: str, states: tuple[int, ...], inputs: Any = (), **options: Any) -> Case:
    """Return a model of a class, with hidden states of a shape, and the `inputs` that are not as in other models."""
    cls = getattr(diffusers, name)
    known, taken = (inspect.signature(function).parameters for function in (cls.__init__, cls.forward))
    sizes = {name: size for name, size in SIZES.items() if name in known}
    every = {
        "hidden_states": random(*states),
        "encoder_hidden_states": random(TEXT, 16),
        "pooled_projections": random(8),
        "timestep": torch.rand(BATCH) * (1 if {"img_ids", "img_shapes"} & taken.keys() else 900),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(1.0 * HEIGHT), torch.arange(1.0 * WIDTH)),
        "txt_ids": torch.zeros(TEXT, 3),
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "return_dict": False,
        **dict(inputs),
    }
    inputs = {name: value for name, value in every.items() if name in taken}
    return Case(randomized(cls(**{**sizes, **options})), inputs, WHOLE)


def flux(**options: Any) -> Case:
    return case("FluxTransformer2DModel", (TOKENS, 8), **options)


def flux2() -> Case:
    inputs = {
        "img_ids": torch.cartesian_prod(*(torch.arange(size) for size in (1, HEIGHT, WIDTH, 1))),
        "txt_ids": torch.cartesian_prod(*(torch.arange(size) for size in (1, 1, 1, TEXT))),
        "guidance": torch.full((BATCH,), 4.0),
    }
    sizes = {"timestep_guidance_channels": 16, "axes_dims_rope": (8, 8, 8, 8)}
    return case("Flux2Transformer2DModel", (TOKENS, 8), inputs, **sizes)


def qwen_image(halves: bool = False, masked: bool = False, **options: Any) -> Case:
    shapes = [(1, HEIGHT // 2, WIDTH)] * 2 if halves else [(1, HEIGHT, WIDTH)]
    inputs = {"img_shapes": [shapes] * BATCH}
    if masked:
        inputs["encoder_hidden_states_mask"] = mask(torch.bool)
    return case("QwenImageTransformer2DModel", (TOKENS, 8), inputs, out_channels=2, **options)


def sd3(**options: Any) -> Case:
    return case("SD3Transformer2DModel", IMAGE, **options)


def pixart() -> Case:
    inputs = {
        "encoder_attention_mask": mask(),
        "timestep": torch.randint(0, 900, (BATCH,)),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return case("PixArtTransformer2DModel", IMAGE, inputs)


def sdxl() -> Case:
    sizes = {"norm_num_groups": 4, "cross_attention_dim": 16, "use_linear_projection": True}
    return case("Transformer2DModel", (8, HEIGHT, WIDTH), {"timestep": None}, **sizes)


def sdxl_unet() -> Case:
    inputs = {
        "sample": random(8, 8, 8),
        "timestep": torch.tensor(300),
        "added_cond_kwargs": {"text_embeds": random(8), "time_ids": random(6)},
    }
    return case(
        "UNet2DConditionModel",
        (),
        inputs,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        num_attention_heads=None,
        attention_head_dim=(1, 2),
        transformer_layers_per_block=(1, 2),
        cross_attention_dim=16,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=32,
        norm_num_groups=8,
    )


def single_block_of_sd3() -> Case:
    return part(randomized(SD3SingleTransformerBlock(WIDE, HEADS, HEAD_DIM)), None, temb=random(WIDE))


def part(module: nn.Module, text: int | None = WIDE, **inputs: Any) -> Case:
    """Return a part of a model, with states of the text of a width."""
    states = {"hidden_states": random(TOKENS, WIDE)}
    if text is not None:
        states["encoder_hidden_states"] = random(TEXT, text)
    return Case(module, states | inputs)


def basic_block(**options: Any) -> Case:
    inputs = {}
    if options.get("norm_type") == "ada_norm_single":
        inputs = {"timestep": random(6 * WIDE)}
    elif "norm_type" in options:
        inputs = {"timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([0, 7])}
    return part(randomized(BasicTransformerBlock(WIDE, HEADS, HEAD_DIM, **options)), 16, **inputs)


def block_of_flux2(rows: tuple[int, int]) -> Case:
    """Return a block whose states of the image have a modulation for each of some rows."""
    modulation = torch.randn(*rows, 6 * WIDE)
    block = flux2().model.transformer_blocks[0]
    return part(block, temb_mod_img=modulation, temb_mod_txt=random(6 * WIDE))


def single_block_of_flux2() -> Case:
    block = flux2().model.single_transformer_blocks[0]
    return part(block, temb_mod=random(3 * WIDE), split_hidden_states=True)


def image_prompt() -> Case:
    block = flux().model.transformer_blocks[0]
    block.attn.set_processor(randomized(FluxIPAdapterAttnProcessor(WIDE, 16)))
    return part(block, temb=random(WIDE), joint_attention_kwargs={"ip_hidden_states": [random(4, 16)]})


def flux_with_lora() -> Case:
    case = flux()
    targets = ["to_q", "to_k", "to_out.0", "add_q_proj", "to_qkv_mlp_proj", "linear_in", "proj_out"]
    case.model.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    return Case(randomized(case.model), case.inputs, case.whole)


def fused_flux() -> Case:
    case = flux()
    case.model.fuse_qkv_projections()
    return case


def ltx(times: int = 1, coordinates: bool = False, frames: int = FRAMES, **options: Any) -> Case:
    tokens = frames * TOKENS
    inputs = {
        "timestep": torch.rand(BATCH, times) * 900,
        "encoder_attention_mask": mask(),
        "rope_interpolation_scale": (0.3, 32, 32),
        "num_frames": frames,
    }
    if coordinates:
        inputs["video_coords"] = torch.rand(BATCH, 3, tokens) * 100
    return case("LTXVideoTransformer3DModel", (tokens, 8), inputs, **options)


def wan(name: str = "Wan", per_token: bool = False, **options: Any) -> Case:
    inputs = {"control_hidden_states": random(*VIDEO)}
    if per_token:
        inputs["timestep"] = torch.rand(BATCH, FRAMES * TOKENS) * 900
    if "image_dim" in options:  # the model takes the last 512 tokens as text
        inputs |= {"encoder_hidden_states": random(512, 16), "encoder_hidden_states_image": random(5, 24)}
    return case(f"{name}Transformer3DModel", VIDEO, inputs, **options)


def wan_block(library: str) -> Case:
    block = getattr(transformers, library).WanTransformerBlock(
        dim=WIDE, ffn_dim=96, num_heads=HEADS, cross_attn_norm=True
    )
    angles = torch.rand(1, TOKENS, 1, HEAD_DIM // 2).repeat_interleave(2, -1)
    return part(randomized(block), temb=random(6, WIDE), rotary_emb=(angles.cos(), angles.sin()))


def wan_with_other_norms() -> Case:
    case = wan()
    case.model.blocks[0].norm1 = nn.LayerNorm(WIDE, elementwise_affine=False)
    case.model.blocks[0].attn1.norm_q = nn.Identity()
    return case


def hunyuan_video(**options: Any) -> Case:
    inputs = {"encoder_attention_mask": mask(torch.long), "guidance": torch.full((BATCH,), 6.0)}
    return case("HunyuanVideoTransformer3DModel", VIDEO, inputs, **options)


def cogvideox(rotary: bool = True) -> Case:
    inputs = {"timestep": torch.randint(0, 900, (BATCH,))}
    if rotary:
        grid = ((0, 0), (HEIGHT, WIDTH))
        inputs["image_rotary_emb"] = get_3d_rotary_pos_embed(HEAD_DIM, grid, (HEIGHT, WIDTH), FRAMES)
    sizes = {"sample_width": 2 * WIDTH, "sample_height": 2 * HEIGHT, "sample_frames": 5, "max_text_seq_length": TEXT}
    shape = (FRAMES, 8, 2 * HEIGHT, 2 * WIDTH)
    return case("CogVideoXTransformer3DModel", shape, inputs, use_rotary_positional_embeddings=rotary, **sizes)


# The functions and their options: {} for the default.
CASES = {
    name: partial(globals()[function], **options)
    for name, (function, options) in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
}
