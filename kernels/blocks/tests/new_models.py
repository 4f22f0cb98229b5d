"""Small random models whose classes the package names nowhere, each with a call of it."""

import json
from pathlib import Path

import small_models
import torch
from model_cases import randomized
from small_models import BATCH, FRAMES, IMAGE, VIDEO, case, mask, random
from small_models import TEXT as TEXT_TOKENS
from text_models import SIZES, TOKENS
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

# Classes' keys by their model types. `experts` are those of all text models, which ignore keys of others.
CONFIGS = json.loads(Path(__file__).with_name("new_models.json").read_text())
TEXT, VISION = CONFIGS["text"], CONFIGS["vision"]


def _text(name):
    config = AutoConfig.for_model(name, **{**SIZES, **CONFIGS["experts"], **TEXT[name]})
    # The default needs experts whose sizes are multiples of 16 bytes, and knows no float64.
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return model, lambda model: model(TOKENS, use_cache=False).logits


def _vision(name):
    model = AutoModel.from_config(AutoConfig.for_model(name, **{**CONFIGS["sizes-of-vision"], **VISION[name]}))
    pixels = torch.randn(2, 3, 32, 32)
    return model, lambda model: model(pixels.to(model.dtype)).last_hidden_state


def _flux_like(name, **options):
    return case(f"{name}Transformer2DModel", (small_models.TOKENS, 8), **options)


def _unscaled(name, states, inputs=(), **options):
    """Return a model that multiplies its timestep itself."""
    return case(name, states, {"timestep": torch.rand(BATCH), **dict(inputs)}, **options)


DIFFUSION = {
    "AuraFlow": lambda: _unscaled("AuraFlowTransformer2DModel", IMAGE, pos_embed_max_size=64),
    "Bria": lambda: _flux_like("Bria"),
    "CogView 4": lambda: case(
        "CogView4Transformer2DModel",
        IMAGE,
        {
            "original_size": torch.full((BATCH, 2), 8),
            "target_size": torch.full((BATCH, 2), 8),
            "crop_coords": torch.zeros(BATCH, 2),
        },
        condition_dim=8,
        rope_axes_dim=(16, 16),
    ),
    "Cosmos": lambda: case(
        "CosmosTransformer3DModel",
        VIDEO,
        {"fps": 8},
        text_embed_dim=16,
        adaln_lora_dim=8,
        max_size=(4, 16, 16),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
    ),
    "Ernie-Image": lambda: case(
        "ErnieImageTransformer2DModel",
        IMAGE,
        {"text_bth": random(TEXT_TOKENS, 16), "text_lens": torch.full((BATCH,), TEXT_TOKENS)},
        hidden_size=64,
        ffn_hidden_size=96,
        text_in_dim=16,
        rope_axes_dim=(8, 12, 12),
    ),
    "LongCat-Image": lambda: _flux_like("LongCatImage"),
    "LTX-2": lambda: case(
        "LTX2VideoTransformer3DModel",
        (FRAMES * small_models.TOKENS, 8),
        {
            "audio_hidden_states": random(6, 8),
            "audio_encoder_hidden_states": random(TEXT_TOKENS, 16),
            "timestep": torch.full((BATCH, FRAMES * small_models.TOKENS), 500.0),
            "audio_timestep": torch.full((BATCH, 6), 500.0),
            "sigma": torch.full((BATCH,), 500.0),
            "audio_sigma": torch.full((BATCH,), 500.0),
            "fps": 8.0,
            "audio_num_frames": 6,
        },
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
    ),
    "Lumina 2": lambda: _unscaled(
        "Lumina2Transformer2DModel",
        IMAGE,
        {"encoder_attention_mask": mask(torch.bool)},
        hidden_size=24,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(32, 16, 16),
    ),
    "Mochi": lambda: case(
        "MochiTransformer3DModel",
        VIDEO,
        {"encoder_hidden_states": random(256, 16), "encoder_attention_mask": torch.ones(BATCH, 256).bool()},
    ),
    "Ovis-Image": lambda: _flux_like("OvisImage"),
    "PRX": lambda: _unscaled("PRXTransformer2DModel", IMAGE, hidden_size=32, num_heads=2, depth=2, axes_dim=[8, 8]),
    "Sana": lambda: case("SanaTransformer2DModel", IMAGE),
    "SkyReels 2": lambda: case("SkyReelsV2Transformer3DModel", VIDEO),
    "Z-Image": lambda: _unscaled(
        "ZImageTransformer2DModel",
        IMAGE,
        {
            "x": list(random(8, 1, *IMAGE[1:])),
            "cap_feats": list(random(5, 16)),
            "t": torch.rand(BATCH),
        },
        dim=32,
        n_layers=2,
        n_heads=2,
        n_kv_heads=2,
        axes_dims=[4, 6, 6],
        axes_lens=[64, 32, 32],
    ),
}
NAMES = [*TEXT, *VISION, *DIFFUSION]


def _diffusion(name):
    case = DIFFUSION[name]()

    def run(model):
        output = model(**case.inputs_in(model.dtype))[0]
        return torch.cat([part.flatten() for part in output]) if isinstance(output, list) else output

    return case.model, run


def new_model(name, seed=0):
    """Return a model of float32 and a function that returns the outputs of a model like it."""
    torch.manual_seed(seed)
    model, run = (_text if name in TEXT else _vision if name in VISION else _diffusion)(name)
    return randomized(model, 0.2), torch.no_grad()(run)
