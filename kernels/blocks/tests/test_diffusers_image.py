"""Image models of diffusers: the kernels that run, and the modules left unchanged."""

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0, JointAttnProcessor2_0
from diffusers.models.transformers import transformer_flux, transformer_flux2, transformer_qwenimage
from model_cases import (
    accelerated,
    check_hooks,
    check_processors,
    error,
    operations,
)
from peft import LoraConfig
from small_image_models import BATCH, TEXT, TOKENS, WIDE, basic_block, flux, flux2, pixart, qwen_image, sd3, sdxl

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_device_of_the_kernels")


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
            {"norm_rotate": 4, "ada_norm": 4 + 1, "gate_residual": 4, "gate_residual_ada_norm": 4, "view_as_real": 4},
        ),
        (sd3, {"ada_norm": 5, "gate_residual": 3, "gate_residual_ada_norm": 3}),
        (
            lambda: sd3(dual_attention_layers=(0,), qk_norm="rms_norm"),
            {"ada_norm": 6, "gate_residual": 4, "gate_residual_ada_norm": 3},
        ),
        (pixart, {"ada_norm": 3, "gate_residual": 4, "gate_residual_ada_norm": 2}),
        (sdxl, {"ada_norm": 2, "div": 0, "gate_residual_ada_norm": 4, "geglu_halves": 2}),
    ],
)
def test_kernels_compute_what_they_can(blocks, build, expected):
    case = accelerated(blocks, build())
    case.run()  # sees how norms round
    counts = operations(case)
    assert {name: counts[name] for name in expected} == expected
    assert counts["neg"] == 0  # of the model's own rotations


@pytest.mark.parametrize(
    ("build", "processor", "calls"),
    [
        (flux, transformer_flux.FluxAttnProcessor, 4),
        (flux2, transformer_flux2.Flux2AttnProcessor, 2),
        (flux2, transformer_flux2.Flux2ParallelSelfAttnProcessor, 2),
        (qwen_image, transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0, 2),
        (sd3, JointAttnProcessor2_0, 2),
        (pixart, AttnProcessor2_0, 4),
        (sdxl, AttnProcessor2_0, 4),
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
        (sd3, "transformer_blocks.0.attn"),
        (pixart, "transformer_blocks.0.norm1"),
        (pixart, "transformer_blocks.1.attn1"),
        (pixart, "transformer_blocks.1.norm2"),
        (sdxl, "transformer_blocks.0.norm1"),
        (sdxl, "transformer_blocks.0.norm3"),
        (sdxl, "transformer_blocks.1.norm2"),
        (sdxl, "transformer_blocks.1.ff.net.0"),
    ],
)
def test_modules_with_hooks_are_called(blocks, build, path):
    check_hooks(blocks, build, path)


@pytest.mark.parametrize("build", [flux, flux2, qwen_image])
@torch.no_grad()
def test_float16_output_is_as_close_to_float32_as_the_models_own(blocks, build):
    case = build()
    expected = case.run()
    lower = case.in_dtype(torch.float16)
    own = error(lower.run(), expected)
    assert 0 < error(accelerated(blocks, lower).run(), expected) <= 1.1 * own


@pytest.mark.parametrize(
    ("build", "gates", "branch"),
    [(flux, "norm1_context.linear", "ff_context.net.2"), (qwen_image, "txt_mod.1", "txt_mlp.net.2")],
)
@torch.no_grad()
def test_float16_sums_that_overflow_are_clipped_as_in_the_model(blocks, build, gates, branch):
    block = build().in_dtype(torch.float16).model.transformer_blocks[0]
    block.get_submodule(gates).bias.fill_(4.0)
    block.get_submodule(branch).bias.fill_(60000.0)
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, WIDE).half(),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, WIDE).half(),
        "temb": torch.randn(BATCH, WIDE).half(),
    }
    if build is qwen_image:
        inputs["encoder_hidden_states_mask"] = None
    expected = block(**inputs)[0]
    blocks.accelerate(block)
    actual = block(**inputs)[0]
    assert (actual == 65504).float().mean() > 0.9
    assert torch.equal(actual, expected)


@torch.no_grad()
def test_a_single_block_of_flux_2_with_streams_apart(blocks):
    block = flux2().model.single_transformer_blocks[0]
    x, context = torch.randn(BATCH, TOKENS, WIDE), torch.randn(BATCH, TEXT, WIDE)
    modulation = torch.randn(BATCH, 3 * WIDE)
    expected = block(x, context, modulation, split_hidden_states=True)
    blocks.accelerate(block)
    for actual, own in zip(block(x, context, modulation, split_hidden_states=True), expected):
        assert error(actual, own) < 1e-5


@pytest.mark.parametrize("rows", [(1, 1), (BATCH, TOKENS)])
@torch.no_grad()
def test_modulations_of_all_samples_and_of_each_token(blocks, rows):
    block = flux2().model.transformer_blocks[0]
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, WIDE),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, WIDE),
        "temb_mod_img": torch.randn(*rows, 6 * WIDE),
        "temb_mod_txt": torch.randn(BATCH, 6 * WIDE),
    }
    expected = block(**inputs)
    blocks.accelerate(block)
    for actual, own in zip(block(**inputs), expected):
        assert error(actual, own) < 1e-5


@pytest.mark.parametrize("build", [flux, flux2])
@torch.no_grad()
def test_attention_without_rotary_embedding(blocks, build):
    case = build()
    attention = case.model.transformer_blocks[0].attn
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, WIDE),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, WIDE),
    }
    expected = attention(**inputs)
    blocks.accelerate(attention)
    for actual, own in zip(attention(**inputs), expected):
        assert error(actual, own) < 1e-5


@torch.no_grad()
def test_image_prompts_of_flux(blocks):
    block = flux().model.transformer_blocks[0]
    processor = transformer_flux.FluxIPAdapterAttnProcessor(WIDE, 16)
    block.attn.set_processor(processor)
    inputs = {
        "hidden_states": torch.randn(BATCH, TOKENS, WIDE),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, WIDE),
        "temb": torch.randn(BATCH, WIDE),
        "joint_attention_kwargs": {"ip_hidden_states": [torch.randn(BATCH, 4, 16)]},
    }
    expected = block(**inputs)
    blocks.accelerate(block)
    for actual, own in zip(block(**inputs), expected):
        assert error(actual, own) < 1e-5


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("build", [flux, flux2, qwen_image, sd3])
@torch.no_grad()
def test_adapters(blocks, build, when):
    case = build()
    targets = ["to_q", "to_k", "to_out.0", "add_q_proj", "to_qkv_mlp_proj", "linear_in", "proj_out"]
    if when == "after":
        blocks.accelerate(case.model)
    without = case.run()
    case.model.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    blocks.accelerate(case.model)
    adapted = case.run()
    assert error(adapted, without) > 1e-2
    blocks.restore(case.model)
    assert error(adapted, case.run()) < 1e-5


@pytest.mark.usefixtures("kernels_of_the_cpu")  # Dynamo of Torch 2.11 cannot trace all of them under a default device
@pytest.mark.parametrize("build", [flux, qwen_image, sd3, sdxl])
def test_forwards_leave_themselves_to_torch_compile(blocks, build):
    case = accelerated(blocks, build())
    with torch.no_grad():
        expected = case.run()
        block = case.model.transformer_blocks[0]
        block.forward = torch.compile(block.forward, backend="eager", fullgraph=True)
        assert error(case.run(), expected) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"norm_type": "ada_norm_zero", "num_embeds_ada_norm": 8},
        {"positional_embeddings": "sinusoidal", "num_positional_embeddings": 64},
    ],
)
@torch.no_grad()
def test_basic_blocks_of_other_kinds(blocks, options):
    case = basic_block(**options)
    if "norm_type" in options:
        case.inputs |= {"timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([0, 7])}
    expected = case.run()
    accelerated(blocks, case)
    assert error(case.run(), expected) < 1e-5
    assert operations(case)["gate_residual_ada_norm"] == 1


@torch.no_grad()
def test_feed_forwards_in_chunks(blocks):
    case = accelerated(blocks, sd3())
    case.model.enable_forward_chunking(chunk_size=1, dim=0)
    actual = case.run()
    assert operations(case)["gate_residual"] > 0
    blocks.restore(case.model)
    assert error(actual, case.run()) < 1e-5
