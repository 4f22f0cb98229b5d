"""Small random image models of diffusers, with inputs for them."""

from typing import Any

import torch
from diffusers import (
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    Transformer2DModel,
    UNet2DConditionModel,
)
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_sd3 import SD3SingleTransformerBlock
from model_cases import Case, randomized
from peft import LoraConfig

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


def sd3(**options: Any) -> Case:
    model = SD3Transformer2DModel(
        **SIZES,
        sample_size=16,
        out_channels=8,
        joint_attention_dim=16,
        caption_projection_dim=WIDE,
        pooled_projection_dim=8,
        pos_embed_max_size=8,
        **options,
    )
    inputs = {
        "hidden_states": torch.randn(BATCH, 8, 2 * HEIGHT, 2 * WIDTH),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
        "pooled_projections": torch.randn(BATCH, 8),
        "timestep": torch.rand(BATCH) * 900,
        "return_dict": False,
    }
    return Case(randomized(model), inputs, ("timestep",))


def sd3_single_block() -> Case:
    block = SD3SingleTransformerBlock(WIDE, HEADS, HEAD_DIM)
    return Case(
        randomized(block), {"hidden_states": torch.randn(BATCH, TOKENS, WIDE), "temb": torch.randn(BATCH, WIDE)}
    )


def pixart() -> Case:
    model = PixArtTransformer2DModel(**SIZES, sample_size=16, cross_attention_dim=WIDE, caption_channels=16)
    mask = torch.ones(BATCH, TEXT)
    mask[1, 4:] = 0
    inputs = {
        "hidden_states": torch.randn(BATCH, 8, 2 * HEIGHT, 2 * WIDTH),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
        "encoder_attention_mask": mask,
        "timestep": torch.randint(0, 900, (BATCH,)),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    }
    return Case(randomized(model), inputs)


def sdxl() -> Case:
    model = Transformer2DModel(**SIZES, norm_num_groups=4, cross_attention_dim=16, use_linear_projection=True)
    inputs = {
        "hidden_states": torch.randn(BATCH, 8, HEIGHT, WIDTH),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
        "return_dict": False,
    }
    return Case(randomized(model), inputs)


def sdxl_unet() -> Case:
    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(1, 2),
        transformer_layers_per_block=(1, 2),
        cross_attention_dim=16,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=32,
        norm_num_groups=8,
    )
    inputs = {
        "sample": torch.randn(BATCH, 4, 8, 8),
        "timestep": torch.tensor(300),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
        "added_cond_kwargs": {"text_embeds": torch.randn(BATCH, 8), "time_ids": torch.randn(BATCH, 6)},
        "return_dict": False,
    }
    return Case(randomized(model), inputs)


def basic_block(**options: Any) -> Case:
    block = BasicTransformerBlock(WIDE, HEADS, HEAD_DIM, **options)
    inputs = {"hidden_states": torch.randn(BATCH, TOKENS, WIDE), "encoder_hidden_states": torch.randn(BATCH, TEXT, 16)}
    if options.get("norm_type") == "ada_norm_single":
        inputs["timestep"] = torch.randn(BATCH, 6 * WIDE)
    elif "norm_type" in options:
        inputs |= {"timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([0, 7])}
    return Case(randomized(block), inputs)


def block_of_flux2(rows: tuple[int, int] = (BATCH, 1)) -> Case:
    """Return a block whose states of the image have a modulation for each of some rows."""
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, WIDE),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, WIDE),
        "temb_mod_img": torch.randn(*rows, 6 * WIDE),
        "temb_mod_txt": torch.randn(BATCH, 6 * WIDE),
    }
    return Case(flux2().model.transformer_blocks[0], inputs)


def single_block_of_flux2() -> Case:
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, WIDE),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, WIDE),
        "temb_mod": torch.randn(BATCH, 3 * WIDE),
        "split_hidden_states": True,
    }
    return Case(flux2().model.single_transformer_blocks[0], inputs)


def attention_without_rotary(case: Case) -> Case:
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, WIDE),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, WIDE),
    }
    return Case(case.model.transformer_blocks[0].attn, inputs)


def image_prompt() -> Case:
    block = flux().model.transformer_blocks[0]
    block.attn.set_processor(randomized(FluxIPAdapterAttnProcessor(WIDE, 16)))
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, WIDE),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, WIDE),
        "temb": torch.randn(BATCH, WIDE),
        "joint_attention_kwargs": {"ip_hidden_states": [torch.randn(BATCH, 4, 16)]},
    }
    return Case(block, inputs)


def adapted(case: Case) -> Case:
    targets = ["to_q", "to_k", "to_out.0", "add_q_proj", "to_qkv_mlp_proj", "linear_in", "proj_out"]
    case.model.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    return Case(randomized(case.model), case.inputs, case.whole)


def chunked(case: Case) -> Case:
    case.model.enable_forward_chunking(chunk_size=1, dim=0)
    return case


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
    "SD 3": sd3,
    "SD 3.5": lambda: sd3(dual_attention_layers=(0,), qk_norm="rms_norm"),
    "single block of SD 3": sd3_single_block,
    "PixArt": pixart,
    "SDXL": sdxl,
    "SDXL, whole": sdxl_unet,
    "block without cross-attention": basic_block,
    "block with cross-attention only": lambda: basic_block(cross_attention_dim=16, only_cross_attention=True),
    "block of Latte": lambda: basic_block(norm_type="ada_norm_single"),
    "block of classes": lambda: basic_block(norm_type="ada_norm_zero", num_embeds_ada_norm=8),
    "block with positions": lambda: basic_block(positional_embeddings="sinusoidal", num_positional_embeddings=64),
    "block of Flux.2, one modulation": lambda: block_of_flux2((1, 1)),
    "block of Flux.2, modulation per token": lambda: block_of_flux2((BATCH, TOKENS)),
    "single block of Flux.2, streams apart": single_block_of_flux2,
    "attention of Flux.1 alone": lambda: attention_without_rotary(flux()),
    "attention of Flux.2 alone": lambda: attention_without_rotary(flux2()),
    "Flux.1, image prompt": image_prompt,
    "SD 3, chunks": lambda: chunked(sd3()),
    "Flux.1, LoRA": lambda: adapted(flux()),
    "Flux.2, LoRA": lambda: adapted(flux2()),
}
