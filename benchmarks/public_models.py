"""Public models that `models.py` and `generate.py` time: real configurations, random weights, inputs of real sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Case:
    """A model and the inputs of one forward.

    Attributes:
        model: Makes the model on the default device in the default dtype.
        inputs: Makes the arguments of its forward; takes the model and the dtype.
        layers: The number of layers as published.
        reset: Undoes a forward's changes to its arguments.
    """

    model: Callable[[int], nn.Module]
    inputs: Callable[[nn.Module, torch.dtype], dict[str, Any]]
    layers: int
    reset: Callable[[dict[str, Any]], None] = lambda inputs: None


def _ltx(layers: int) -> nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(num_layers=layers)


def _ltx_inputs(frames: int, height: int, width: int) -> Callable[[nn.Module, torch.dtype], dict[str, Any]]:
    def inputs(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(1, frames * height * width, 128, dtype=dtype),
            "encoder_hidden_states": torch.randn(1, 128, 4096, dtype=dtype),
            "timestep": torch.full((1,), 500.0, dtype=dtype),
            "encoder_attention_mask": torch.ones(1, 128, dtype=dtype),
            "num_frames": frames,
            "height": height,
            "width": width,
            "rope_interpolation_scale": (8 / 25, 32, 32),
            "return_dict": False,
        }

    return inputs


def _wan(layers: int) -> nn.Module:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=layers, text_dim=4096
    )
    # `from_pretrained` keeps these in float32 in a model of any dtype.
    kept = tuple(model._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        if any(part in name for part in kept):
            parameter.data = parameter.data.float()
    return model


def _wan_inputs(frames: int) -> Callable[[nn.Module, torch.dtype], dict[str, Any]]:
    def inputs(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(1, 16, frames, 60, 104, dtype=dtype),
            "timestep": torch.full((1,), 500.0),
            "encoder_hidden_states": torch.randn(1, 512, 4096, dtype=dtype),
            "return_dict": False,
        }

    return inputs


def _qwen3(layers: int) -> nn.Module:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM(qwen3_config(layers, hidden_size=4096, intermediate_size=12288))


def _prefill(tokens: int) -> Callable[[nn.Module, torch.dtype], dict[str, Any]]:
    def inputs(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
        ids = torch.randint(0, 150_000, (1, tokens))
        return {"input_ids": ids, "use_cache": False, "logits_to_keep": 1, "return_dict": False}

    return inputs


_CACHED = 1024  # tokens in the cache when one is decoded


def _decoding(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=_CACHED + 64)
    with torch.no_grad():
        model(input_ids=torch.randint(0, 150_000, (1, _CACHED)), past_key_values=cache, logits_to_keep=1)
    return {
        "input_ids": torch.randint(0, 150_000, (1, 1)),
        "position_ids": torch.tensor([[_CACHED]]),
        "past_key_values": cache,
        "use_cache": True,
        "logits_to_keep": 1,
        "return_dict": False,
    }


def _forget_token(inputs: dict[str, Any]) -> None:
    for layer in inputs["past_key_values"].layers:
        layer.cumulative_length.fill_(_CACHED)
        for tensor in (layer.keys, layer.values, layer.cumulative_length):
            # For CUDA graphs of `reduce-overhead`: the cache's own mark does not reach another process.
            torch._dynamo.mark_static_address(tensor)


def _flux(layers: int) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(num_layers=layers, num_single_layers=2 * layers, guidance_embeds=True)


def _flux_inputs(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4096, 64, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, 512, 4096, dtype=dtype),
        "pooled_projections": torch.randn(1, 768, dtype=dtype),
        "timestep": torch.full((1,), 0.5, dtype=dtype),
        "img_ids": torch.zeros(4096, 3, dtype=dtype),
        "txt_ids": torch.zeros(512, 3, dtype=dtype),
        "guidance": torch.full((1,), 3.5),
        "return_dict": False,
    }


def _qwen_image(layers: int) -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(num_layers=layers)


def _qwen_image_inputs(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4096, 64, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, 256, 3584, dtype=dtype),
        "encoder_hidden_states_mask": torch.ones(1, 256, dtype=torch.bool),
        "timestep": torch.full((1,), 0.5, dtype=dtype),
        "img_shapes": [[(1, 64, 64)]],
        "return_dict": False,
    }


def _qwen3_moe(layers: int) -> nn.Module:
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(qwen3_moe_config(layers))


def _qwen3_vl(layers: int) -> nn.Module:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": layers, "vocab_size": 151936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config={**text, **heads}, vision_config={**vision, "deepstack_visual_indexes": [5, 11, 17]})
    )


def _image_and_text(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    grid = torch.tensor([[1, 64, 64]])  # patches of 16x16 pixels; four of them are one token
    ids = torch.randint(0, 150_000, (1, 1024 + 128))
    ids[:, 64 : 64 + 1024] = model.config.image_token_id
    pixels = torch.randn(64 * 64, 3 * 2 * 16 * 16, dtype=dtype)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == model.config.image_token_id).int(),
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "use_cache": False,
        "logits_to_keep": 1,
    }


def _gemma3n(layers: int) -> nn.Module:
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    options = {"activation_sparsity_pattern": [0.0] * layers, "num_kv_shared_layers": 0}
    return Gemma3nForCausalLM(Gemma3nTextConfig(num_hidden_layers=layers, **options))


def _z_image(layers: int) -> nn.Module:
    from diffusers import ZImageTransformer2DModel

    return ZImageTransformer2DModel(n_layers=layers)


def _z_image_inputs(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "x": [torch.randn(16, 1, 128, 128, dtype=dtype)],
        "t": torch.full((1,), 0.5, dtype=dtype),
        "cap_feats": [torch.randn(256, 2560, dtype=dtype)],
        "return_dict": False,
    }


def _cogvideox(layers: int) -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(num_attention_heads=48, num_layers=layers, use_rotary_positional_embeddings=True)


def _cogvideox_inputs(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    tables = get_3d_rotary_pos_embed(64, ((0, 0), (30, 45)), (30, 45), 7)
    hidden_states = torch.randn(1, 7, 16, 60, 90, dtype=dtype)
    return {
        "hidden_states": hidden_states,
        "encoder_hidden_states": torch.randn(1, 226, 4096, dtype=dtype),
        "timestep": torch.full((1,), 500),
        "image_rotary_emb": tuple(table.to(hidden_states.device) for table in tables),
        "return_dict": False,
    }


def _siglip(layers: int) -> nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16}
    return SiglipVisionModel(SiglipVisionConfig(**sizes, num_hidden_layers=layers, image_size=384, patch_size=14))


def _images(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    return {"pixel_values": torch.randn(8, 3, 384, 384, dtype=dtype), "return_dict": False}


CASES = {
    "ltx-2464": Case(_ltx, _ltx_inputs(7, 16, 22), 28),
    "ltx-7056": Case(_ltx, _ltx_inputs(9, 28, 28), 28),
    "wan-7800": Case(_wan, _wan_inputs(5), 30),
    "wan-32760": Case(_wan, _wan_inputs(21), 30),
    "qwen3-128": Case(_qwen3, _prefill(128), 36),
    "qwen3-8192": Case(_qwen3, _prefill(8192), 36),
    "qwen3-decode": Case(_qwen3, _decoding, 36, _forget_token),
    "flux-4608": Case(_flux, _flux_inputs, 19),
    "qwen-image-4352": Case(_qwen_image, _qwen_image_inputs, 60),
    "qwen3-moe-1024": Case(_qwen3_moe, _prefill(1024), 8),
    "qwen3-vl-1152": Case(_qwen3_vl, _image_and_text, 36),
    "gemma3n-1024": Case(_gemma3n, _prefill(1024), 30),
    "z-image-4096": Case(_z_image, _z_image_inputs, 30),
    "cogvideox-9450": Case(_cogvideox, _cogvideox_inputs, 42),
    "siglip-8": Case(_siglip, _images, 27),
}


# --- configurations of language models -------------------------------------------------------------------------------


def llama_config(layers: int) -> Any:
    """Return the configuration of Llama 3.1 8B."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    )


def qwen3_config(layers: int, **sizes: Any) -> Any:
    """Return the configuration of a Qwen3 model, given the differences between their sizes."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151936,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        **sizes,
    )


def qwen2_config(layers: int) -> Any:
    """Return the configuration of Qwen2.5 1.5B."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def gemma3_config(layers: int) -> Any:
    """Return the configuration of the text model of Gemma 3 4B."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=262208,
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=1024,
    )


def qwen3_moe_config(layers: int) -> Any:
    """Return the configuration of Qwen3-30B-A3B."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )


def make(case: Case, device: str, dtype: torch.dtype, layers: int | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model and its inputs."""
    model = make_model(case, device, dtype, layers)
    return model, make_inputs(case, model, device, dtype)


def make_model(case: Any, device: str, dtype: torch.dtype, layers: int | None = None) -> Any:
    """Return the model of a case of this module or of `generate.py`, with the same parameters in every call."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return case.model(layers or case.layers).eval()
    finally:
        torch.set_default_dtype(default)


def make_inputs(case: Case, model: nn.Module, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a forward, the same ones in every call."""
    torch.manual_seed(1)
    with torch.device(device):
        return case.inputs(model, dtype)
