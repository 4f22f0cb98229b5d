"""Video models of diffusers: the kernels that run, and the modules left unchanged."""

import pytest
import torch
from diffusers.models import attention
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from model_cases import (
    Case,
    accelerated,
    check_hooks,
    check_processors,
    error,
    operations,
)
from small_video_models import TEXT, TOKENS, WIDE, cogvideox, hunyuan_video, ltx, wan, wan_block, wan_vace
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_device_of_the_kernels")


@torch.no_grad()
def test_wan_in_bfloat16_with_modules_that_are_kept_in_float32(blocks):
    case = wan()
    expected = case.run()
    lower = case.in_dtype(torch.bfloat16)
    for name, parameter in [*lower.model.named_parameters(), *lower.model.named_buffers()]:
        if not set(name.split(".")).isdisjoint(lower.model._keep_in_fp32_modules):  # as from_pretrained does
            parameter.data = parameter.data.float()
    own = error(lower.run(), expected)
    assert 0 < error(accelerated(blocks, lower).run(), expected) <= 1.1 * own
    assert operations(lower)["gate_residual_ada_norm"] == 4


@torch.no_grad()
def test_wan_with_fused_projections(blocks):
    case = wan()
    expected = case.run()
    for block in case.model.blocks:
        block.attn1.fuse_projections()
    assert error(accelerated(blocks, case).run(), expected) < 1e-5
    assert operations(case)["norm_rotate"] == 2


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (ltx, {"norm_rotate": 2, "ada_norm": 2, "gate_residual": 4, "gate_residual_ada_norm": 2}),
        (wan, {"norm_rotate": 2, "gate_residual": 2, "gate_residual_ada_norm": 4}),
        (lambda: wan(per_token=True), {"norm_rotate": 2, "gate_residual": 2, "gate_residual_ada_norm": 4}),
        (wan_vace, {"norm_rotate": 4, "gate_residual": 4, "gate_residual_ada_norm": 8}),
        (lambda: wan_block("chronoedit"), {"norm_rotate": 1, "gate_residual": 1, "gate_residual_ada_norm": 2}),
        (hunyuan_video, {"norm_rotate": 4, "gate_residual": 6, "gate_residual_ada_norm": 4}),
        (cogvideox, {"rotate_tokens_": 4, "ada_norm": 9, "gate_residual": 4, "gate_residual_ada_norm": 4}),
    ],
)
def test_kernels_compute_what_they_can(blocks, build, expected):
    case = accelerated(blocks, build())
    counts = operations(case)
    assert {name: counts[name] for name in expected if counts[name] < expected[name]} == {}
    assert counts["neg"] == 0  # of the model's own rotations


@torch.no_grad()
def test_parts_of_one_tensor_are_joined_without_a_copy(blocks):
    join = blocks.projections.joined_tokens
    both = torch.randn(2, 10, 8)
    joined = join(both[:, :-3], both[:, -3:], 1)
    assert joined.data_ptr() == both.data_ptr()
    assert torch.equal(joined, both)
    for x, more in ((both[:, -3:], both[:, :-3]), (both[:, :5], both[:, 6:]), (both[:1, :-3], both[1:, -3:])):
        assert torch.equal(join(x, more, 1), torch.cat((x, more), 1))
    with torch.enable_grad():
        both.requires_grad_()
        joined = join(both[:, :-3], both[:, -3:], 1)
        assert joined.data_ptr() != both.data_ptr()


# --- models left unchanged -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "processor", "calls"),
    [
        (ltx, LTXVideoAttnProcessor, 4),
        (wan, WanAttnProcessor, 4),
        (hunyuan_video, HunyuanVideoAttnProcessor2_0, 4),
        (cogvideox, CogVideoXAttnProcessor2_0, 2),
    ],
)
def test_other_attention_processors_are_called(blocks, build, processor, calls):
    check_processors(blocks, build, processor, calls)


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (ltx, "transformer_blocks.0.norm1"),
        (ltx, "transformer_blocks.0.norm2"),
        (ltx, "transformer_blocks.1.attn1.norm_q"),
        (ltx, "transformer_blocks.1.attn2.norm_k"),
        (wan, "blocks.0.norm1"),
        (wan, "blocks.0.norm2"),
        (wan, "blocks.1.norm3"),
        (wan, "blocks.1.attn1.norm_k"),
        (wan_vace, "vace_blocks.0.norm2"),
        (hunyuan_video, "transformer_blocks.0.norm2"),
        (hunyuan_video, "transformer_blocks.0.attn"),
        (hunyuan_video, "transformer_blocks.1.attn.norm_added_k"),
        (hunyuan_video, "single_transformer_blocks.0.attn.norm_q"),
        (hunyuan_video, "single_transformer_blocks.1.act_mlp"),
        (cogvideox, "transformer_blocks.0.norm1.norm"),
        (cogvideox, "transformer_blocks.0.norm2"),
        (cogvideox, "transformer_blocks.0.attn1"),
        (cogvideox, "transformer_blocks.1.attn1.norm_q"),
        (cogvideox, "transformer_blocks.1.norm2.linear"),
        (cogvideox, "norm_out.norm"),
    ],
)
def test_modules_with_hooks_are_called(blocks, build, path):
    check_hooks(blocks, build, path)


@pytest.mark.parametrize(
    "build", [lambda: ltx(norm_elementwise_affine=True), lambda: hunyuan_video(image_condition_type="token_replace")]
)
@torch.no_grad()
def test_blocks_of_another_structure(blocks, build):
    case = build()
    expected = case.run()
    accelerated(blocks, case)
    assert error(case.run(), expected) < 1e-5
    assert operations(Case(case.model, case.inputs))["gate_residual"] > 0


@torch.no_grad()
def test_other_classes_in_place_of_norms(blocks):
    case = wan()
    case.model.blocks[0].norm1 = nn.LayerNorm(WIDE, elementwise_affine=False)
    case.model.blocks[0].attn1.norm_q = nn.Identity()
    expected = case.run()
    accelerated(blocks, case)
    assert error(case.run(), expected) < 1e-5
    counts = operations(case)
    assert counts["norm_rotate"] == 1 and counts["gate_residual_ada_norm"] == 4


@torch.no_grad()
def test_modulation_of_another_dtype_keeps_the_models_own_result(blocks):
    block = ltx().in_dtype(torch.bfloat16).model.transformer_blocks[0]
    inputs = {
        "hidden_states": torch.randn(1, TOKENS, WIDE, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.randn(1, TEXT, WIDE, dtype=torch.bfloat16),
        "temb": torch.randn(1, 1, 6 * WIDE),
    }
    block.attn1.to_q = block.attn1.to_q.float()
    with pytest.raises(RuntimeError, match="dtype"):  # the modulated float32 states meet bfloat16 weights
        block(**inputs)
    blocks.accelerate(block)
    with pytest.raises(RuntimeError, match="dtype"):
        block(**inputs)


# --- tables of rotary embeddings -------------------------------------------------------------------------------------


def test_tables_made_in_inference_mode_serve_training(blocks):
    case = accelerated(blocks, ltx())
    with torch.inference_mode():
        case.run()
    case.run().sum().backward()


# --- feed-forwards ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["geglu", "swiglu"])
def test_gated_feed_forwards(blocks, activation):
    module = attention.FeedForward(WIDE, activation_fn=activation)
    x = torch.randn(2, TOKENS, WIDE, requires_grad=True)
    expected = module(x)
    (expected_grad,) = torch.autograd.grad(expected.sum(), x)
    report = blocks.accelerate(module)
    assert sum(report.replaced.values()) == 1
    actual = module(x)
    (grad,) = torch.autograd.grad(actual.sum(), x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(grad, expected_grad)


@torch.no_grad()
def test_gelu_in_the_epilogue_of_a_projection(blocks):
    feed_forward = blocks.projections
    projection = nn.Linear(WIDE, 96)
    x = torch.randn(2, TOKENS, WIDE)
    # The epilogue of the CPU has the exact GELU, that of CUDA the tanh approximation.
    approximate = "tanh" if feed_forward.DEVICE == "cuda" else "none"
    expected = nn.functional.gelu(projection(x), approximate=approximate)
    torch.testing.assert_close(feed_forward.linear_gelu(projection, x), expected)


def test_epilogues_take_plain_projections_only(blocks):
    is_plain = blocks.projections.is_plain_linear
    projection = nn.Linear(WIDE, 96)
    assert is_plain(projection, torch.float32)
    assert not is_plain(projection, torch.bfloat16)
    assert not is_plain(nn.Linear(WIDE, 96, bias=False), torch.float32)
    assert not is_plain(nn.modules.linear.NonDynamicallyQuantizableLinear(WIDE, 96), torch.float32)
    projection.register_forward_hook(lambda module, args, output: None)
    assert not is_plain(projection, torch.float32)
