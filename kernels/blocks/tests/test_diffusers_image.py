"""Image models of diffusers: as close to float32 as their own forwards, and left alone where they must be."""

import pytest
from diffusers.models.transformers import transformer_flux, transformer_flux2, transformer_qwenimage
from model_cases import (
    accelerated,
    check_bfloat16_gradients,
    check_bfloat16_output,
    check_float32_gradients,
    check_float32_output,
    check_hooks,
    check_processors,
    operations,
)
from small_image_models import CASES, flux, flux2, pixart, qwen_image, sd3, sdxl

GRADIENTS = ("Flux.1", "Flux.2", "Qwen-Image", "Qwen-Image, edited", "SD 3.5", "PixArt", "SDXL")


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_output_is_as_close_to_float32_as_the_models_own(blocks, name):
    check_bfloat16_output(blocks, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_float32_output_is_that_of_the_model(blocks, name):
    check_float32_output(blocks, CASES[name])


@pytest.mark.parametrize("name", GRADIENTS)
def test_bfloat16_gradients_are_as_close_to_float32_as_the_models_own(blocks, name):
    check_bfloat16_gradients(blocks, CASES[name])


@pytest.mark.parametrize("name", GRADIENTS)
def test_float32_gradients_are_those_of_the_model(blocks, name):
    check_float32_gradients(blocks, CASES[name])


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (
            flux,
            {"norm_rotate": 2 * 2 + 2, "ada_norm": 2 * 2 + 2 + 1, "gate_residual": 4 + 2, "gate_residual_ada_norm": 4},
        ),
        (
            flux2,
            {"norm_rotate": 6, "ada_norm": 7, "gate_residual": 6, "gate_residual_ada_norm": 4, "geglu_halves": 6},
        ),
        (
            qwen_image,
            {"norm_rotate": 4, "ada_norm": 4 + 1, "gate_residual": 4, "gate_residual_ada_norm": 4, "view_as_real": 0},
        ),
        (sd3, {"ada_norm": 5, "gate_residual": 3, "gate_residual_ada_norm": 3}),
        (
            lambda: sd3(dual_attention_layers=(0,), qk_norm="rms_norm"),
            {"ada_norm": 6, "gate_residual": 4, "gate_residual_ada_norm": 3},
        ),
        (pixart, {"ada_norm": 3, "gate_residual": 4, "gate_residual_ada_norm": 2}),
        (sdxl, {"ada_norm": 2, "gate_residual_ada_norm": 4, "geglu_halves": 2}),
    ],
)
def test_kernels_compute_what_they_can(blocks, build, expected):
    case = accelerated(blocks, build())
    case.run()  # keeps the tables
    found = operations(case)
    assert {name: found[name] for name in expected} == expected
    assert found["neg"] == 0  # of the model's own rotations


@pytest.mark.parametrize(
    ("build", "processor", "calls"),
    [
        (flux, transformer_flux.FluxAttnProcessor, 4),
        (flux2, transformer_flux2.Flux2AttnProcessor, 2),
        (flux2, transformer_flux2.Flux2ParallelSelfAttnProcessor, 2),
        (qwen_image, transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0, 2),
    ],
)
def test_other_attention_processors_are_called(blocks, build, processor, calls):
    check_processors(blocks, build, processor, calls)


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (flux, "transformer_blocks.0.norm1"),
        (flux, "transformer_blocks.0.norm1.norm"),
        (flux, "transformer_blocks.0.norm2"),
        (flux, "transformer_blocks.0.norm2_context"),
        (flux, "transformer_blocks.1.attn"),
        (flux, "transformer_blocks.1.attn.norm_added_k"),
        (flux, "single_transformer_blocks.0.attn.norm_q"),
        (flux, "single_transformer_blocks.1.norm.norm"),
        (flux, "single_transformer_blocks.1.act_mlp"),
        (flux, "norm_out.norm"),
        (flux2, "transformer_blocks.0.norm1"),
        (flux2, "transformer_blocks.0.norm2_context"),
        (flux2, "transformer_blocks.0.ff.act_fn.gate_fn"),
        (flux2, "transformer_blocks.1.attn.norm_added_q"),
        (flux2, "transformer_blocks.1.attn"),
        (flux2, "single_transformer_blocks.0.norm"),
        (flux2, "single_transformer_blocks.0.attn.norm_k"),
        (flux2, "single_transformer_blocks.1.attn.mlp_act_fn"),
        (qwen_image, "pos_embed"),
        (qwen_image, "transformer_blocks.0.img_norm1"),
        (qwen_image, "transformer_blocks.0.txt_norm2"),
        (qwen_image, "transformer_blocks.1.attn"),
        (qwen_image, "transformer_blocks.1.attn.norm_added_q"),
        (sd3, "transformer_blocks.0.norm1.norm"),
        (sd3, "transformer_blocks.0.norm2_context"),
        (sd3, "transformer_blocks.1.norm1_context.norm"),
        (sd3, "transformer_blocks.1.norm2"),
        (pixart, "transformer_blocks.0.norm1"),
        (pixart, "transformer_blocks.1.norm2"),
        (sdxl, "transformer_blocks.0.norm1"),
        (sdxl, "transformer_blocks.0.norm3"),
        (sdxl, "transformer_blocks.1.norm2"),
        (sdxl, "transformer_blocks.1.ff.net.0"),
    ],
)
def test_modules_with_hooks_are_called(blocks, build, path):
    check_hooks(blocks, build, path)
