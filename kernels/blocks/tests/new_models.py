"""Small random models whose classes the package names nowhere, each with a call of it."""

import diffusers
import torch
from example_models import DEVICE
from text_models import SIZES
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_DEEPSEEK = {**_MOE, **_LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TEXT = {
    "afmoe": _MOE,
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": {},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "dots1": {**_MOE, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {**_MOE, "moe_num_experts": 4, "moe_k": 2},
    "exaone4": {},
    "gemma3n_text": {
        **_TWO_KINDS,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 99,
        "laurel_rank": 8,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0],
        "intermediate_size": [96, 96],
        "altup_num_inputs": 2,
    },
    "gemma4_text": {
        **_TWO_KINDS,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 99,
        "num_kv_shared_layers": 0,
        "global_head_dim": 16,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": _MOE,
    "gpt_oss": {**_MOE, **_TWO_KINDS},
    "granite": {},
    "granitemoe": _MOE,
    "helium": {},
    "hunyuan_v1_dense": {},
    "lfm2": {},
    "llama4_text": {**_MOE, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2},
    "minimax_m2": _MOE,
    "ministral": {},
    "mixtral": _MOE,
    "olmo": {},
    "olmoe": _MOE,
    "phimoe": _MOE,
    "qwen2_moe": _MOE,
    "qwen3_5_text": _LINEAR,
    "qwen3_moe": _MOE,
    "qwen3_next": {**_MOE, **_LINEAR, **_GATED_DELTA, "shared_expert_intermediate_size": 32},
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": {},
    "vaultgemma": {},
}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
VISION = {
    "aimv2_vision_model": {},
    "clip_vision_model": {},
    "dinov2": {},
    "dinov3_vit": {},
    "idefics3_vision": {},
    "internvl_vision": {"image_size": [32, 32], "patch_size": [8, 8]},
    "pixtral": {"head_dim": 16},
    "siglip_vision_model": {},
    "vit": {},
}
_TOKENS = torch.arange(3, 27, device=DEVICE).view(2, 12)


def _text(name):
    config = AutoConfig.for_model(name, **{**SIZES, **TEXT[name]})
    # The default needs experts whose sizes are multiples of 16 bytes, and knows no float64.
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return model, lambda model: model(_TOKENS, use_cache=False).logits


def _vision(name):
    model = AutoModel.from_config(AutoConfig.for_model(name, **{**_VISION, **VISION[name]}))
    pixels = torch.randn(2, 3, 32, 32)
    return model, lambda model: model(pixels.to(model.dtype)).last_hidden_state


def _diffusion(cls, sizes, *inputs, **named):
    """Return a model of diffusers and a call of it. Floating-point inputs get its dtype."""

    def cast(value, dtype):
        if isinstance(value, list):
            return [cast(part, dtype) for part in value]
        return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    def run(model):
        arguments = [cast(value, model.dtype) for value in inputs]
        output = model(*arguments, **{name: cast(value, model.dtype) for name, value in named.items()})[0]
        return torch.cat([part.flatten() for part in output]) if isinstance(output, list) else output

    return getattr(diffusers, cls)(**sizes), run


_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
_TIME = torch.tensor([500.0, 500.0], device=DEVICE)


def _ids(tokens):
    return torch.stack([torch.zeros(tokens), torch.arange(tokens) // 4, torch.arange(tokens) % 4], -1)


def _flux_like(cls, time="timestep", **sizes):
    sizes = {"in_channels": 16, "joint_attention_dim": 32, "num_single_layers": 1, **_HEADS, **sizes}
    return _diffusion(
        cls,
        {"axes_dims_rope": (4, 6, 6), **sizes},
        hidden_states=torch.randn(2, 16, 16),
        encoder_hidden_states=torch.randn(2, 5, 32),
        img_ids=_ids(16),
        txt_ids=torch.zeros(5, 3),
        return_dict=False,
        **{time: _TIME / 1000},
    )


DIFFUSION = {
    "AuraFlow": lambda: _diffusion(
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 64,
        },
        torch.randn(2, 4, 8, 8),
        torch.randn(2, 5, 32),
        _TIME / 1000,
        return_dict=False,
    ),
    "Bria": lambda: _flux_like("BriaTransformer2DModel"),
    "CogView 4": lambda: _diffusion(
        "CogView4Transformer2DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_embed_dim": 32,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "rope_axes_dim": (16, 16),
            "sample_size": 8,
        },
        torch.randn(2, 4, 8, 8),
        torch.randn(2, 5, 32),
        _TIME,
        torch.tensor([[8, 8], [8, 8]]),
        torch.tensor([[8, 8], [8, 8]]),
        torch.zeros(2, 2),
        return_dict=False,
    ),
    "Cosmos": lambda: _diffusion(
        "CosmosTransformer3DModel",
        {
            **_HEADS,
            "attention_head_dim": 18,
            "in_channels": 4,
            "out_channels": 4,
            "text_embed_dim": 32,
            "adaln_lora_dim": 8,
            "max_size": (4, 8, 8),
            "concat_padding_mask": False,
            "extra_pos_embed_type": None,
        },
        torch.randn(1, 4, 2, 8, 8),
        _TIME[:1],
        torch.randn(1, 5, 32),
        fps=8,
        return_dict=False,
    ),
    "LongCat-Image": lambda: _flux_like("LongCatImageTransformer2DModel", pooled_projection_dim=32),
    "LTX-2": lambda: _diffusion(
        "LTX2VideoTransformer3DModel",
        {
            **_HEADS,
            "in_channels": 8,
            "out_channels": 8,
            "cross_attention_dim": 32,
            "audio_in_channels": 8,
            "audio_out_channels": 8,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": 16,
            "caption_channels": 16,
        },
        torch.randn(1, 12, 8),
        torch.randn(1, 6, 8),
        torch.randn(1, 5, 16),
        torch.randn(1, 5, 16),
        torch.full((1, 12), 500.0),
        audio_timestep=torch.full((1, 6), 500.0),
        sigma=_TIME[:1],
        audio_sigma=_TIME[:1],
        num_frames=1,
        height=3,
        width=4,
        fps=8.0,
        audio_num_frames=6,
        return_dict=False,
    ),
    "Lumina 2": lambda: _diffusion(
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 8,
            "axes_dim_rope": (4, 4, 4),
            "axes_lens": (32, 16, 16),
            "cap_feat_dim": 32,
        },
        torch.randn(2, 4, 8, 8),
        _TIME / 1000,
        torch.randn(2, 5, 32),
        torch.ones(2, 5, dtype=torch.bool),
        return_dict=False,
    ),
    "Mochi": lambda: _diffusion(
        "MochiTransformer3DModel",
        {**_HEADS, "pooled_projection_dim": 16, "in_channels": 4, "text_embed_dim": 32, "time_embed_dim": 8},
        torch.randn(1, 4, 2, 8, 8),
        torch.randn(1, 256, 32),
        _TIME[:1],
        torch.ones(1, 256, dtype=torch.bool),
        return_dict=False,
    ),
    "Ovis-Image": lambda: _flux_like("OvisImageTransformer2DModel", out_channels=16),
    "PRX": lambda: _diffusion(
        "PRXTransformer2DModel",
        {
            "in_channels": 4,
            "context_in_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "depth": 2,
            "axes_dim": [8, 8],
        },
        torch.randn(2, 4, 8, 8),
        _TIME / 1000,
        torch.randn(2, 5, 32),
        return_dict=False,
    ),
    "Sana": lambda: _diffusion(
        "SanaTransformer2DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 32,
            "sample_size": 8,
        },
        torch.randn(2, 4, 8, 8),
        torch.randn(2, 5, 32),
        _TIME,
        return_dict=False,
    ),
    "SkyReels 2": lambda: _diffusion(
        "SkyReelsV2Transformer3DModel",
        {**_HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 16, "ffn_dim": 64},
        torch.randn(1, 4, 2, 8, 8),
        _TIME[:1],
        torch.randn(1, 5, 32),
        return_dict=False,
    ),
    "Z-Image": lambda: _diffusion(
        "ZImageTransformer2DModel",
        {
            "in_channels": 4,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 32,
            "axes_dims": [4, 6, 6],
            "axes_lens": [64, 32, 32],
        },
        [torch.randn(4, 1, 8, 8)],
        _TIME[:1] / 1000,
        [torch.randn(5, 32)],
        return_dict=False,
    ),
}
NAMES = [*TEXT, *VISION, *DIFFUSION]


def new_model(name, seed=0):
    """Return a model of float32 and a function that returns the outputs of a model like it."""
    torch.manual_seed(seed)
    if name in TEXT:
        model, run = _text(name)
    else:
        model, run = _vision(name) if name in VISION else DIFFUSION[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:  # the weights of new norms are ones or zeros
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            parameter.copy_(parameter.bfloat16())  # so that models of both dtypes have the same
    return model.eval(), torch.no_grad()(run)
