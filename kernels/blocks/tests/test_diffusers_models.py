"""Models of diffusers: the kernels that run, and the accuracy of results and gradients."""

import json
import statistics
from collections import Counter
from pathlib import Path

import pytest
import small_models
import torch
from model_cases import Case, accelerated, built, error
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_device_of_the_kernels")

CASES = small_models.CASES
IN_FLOAT16 = ("Flux.1", "Flux.2", "Qwen-Image")
GRADIENTS = (
    *("Flux.1", "Flux.2", "Qwen-Image", "Qwen-Image, edited", "SD 3.5", "PixArt", "SDXL"),
    *("LTX-Video", "Wan", "Wan, time per token", "HunyuanVideo", "CogVideoX"),
)
# The kernels whose number in each forward model_kernels.json has, in its order.
COUNTED = (
    *("ada_layer_norm", "ada_rms_norm", "gate_residual", "gate_residual_ada_norm"),
    *("rms_norm", "norm_rotary", "apply_rotary", "geglu_pair", "swiglu_pair"),
)
KERNELS = json.loads(Path(__file__).with_name("model_kernels.json").read_text())


def gradients(case):
    """Return the gradients of the parameters, and of the inputs that have one."""
    inputs = {}
    for name in ("hidden_states", "encoder_hidden_states"):
        inputs[name] = case.inputs[name].clone().requires_grad_()
    # Not by cuDNN: for so few tokens it gives wrong or infinite gradients, also in models' own forwards (Torch 2.11).
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        outputs = Case(case.model, case.inputs | inputs).run()
        torch.manual_seed(1)
        tensors = [*case.model.parameters(), *inputs.values()]
        return torch.autograd.grad(outputs, tensors, torch.randn_like(outputs), allow_unused=True)


def error_ratio(ours, own, expected):
    """Return the geometric mean over all gradients: some of them, as that of a bias of k, are little but rounding."""
    ratios = [
        error(gradient.float(), reference) / error(other.float(), reference)
        for gradient, other, reference in zip(ours, own, expected)
        if reference is not None and reference.norm() > 1e-6
    ]
    assert len(ratios) > 10
    return statistics.geometric_mean(ratios)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_output_is_that_of_the_model(blocks, name):
    """Outputs of float32 stay, and those of 16 bits are as close to them as by the model's own forwards."""
    dtypes = [torch.bfloat16, *[torch.float16] * (name in IN_FLOAT16)]
    own, ours = dict.fromkeys(dtypes, 0.0), dict.fromkeys(dtypes, 0.0)
    for seed in range(2):
        case = built(CASES[name], seed)
        expected = case.run()
        if seed == 0:
            faster = accelerated(blocks, case)
            assert error(faster.run(), expected) < 1e-5
            assert name not in KERNELS or faster.model.kernels == Counter(dict(zip(COUNTED, KERNELS[name])))
        for dtype in dtypes:
            lower = case.in_dtype(dtype)
            own[dtype] += error(lower.run(), expected) ** 2
            ours[dtype] += error(accelerated(blocks, lower).run(), expected) ** 2
    assert all(0 < ours[dtype] <= 1.1**2 * own[dtype] for dtype in dtypes)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_model(blocks, name):
    """Those of bfloat16 are as close to those of float32 as by the model's own forwards."""
    case = built(CASES[name])
    expected = gradients(case)
    for ours, own in zip(gradients(accelerated(blocks, case)), expected):
        assert (ours is None) == (own is None)
        if own is not None:
            torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5 * own.abs().max().item() + 1e-7)
    lower = case.in_dtype(torch.bfloat16)
    own = gradients(lower)
    assert error_ratio(gradients(accelerated(blocks, lower)), own, expected) <= 1.1


@pytest.mark.parametrize(
    ("name", "gates", "branch"),
    [("Flux.1", "norm1_context.linear", "ff_context.net.2"), ("Qwen-Image", "txt_mod.1", "txt_mlp.net.2")],
)
@torch.no_grad()
def test_float16_sums_that_overflow_are_clipped_as_in_the_model(blocks, name, gates, branch):
    block = CASES[name]().in_dtype(torch.float16).model.transformer_blocks[0]
    block.get_submodule(gates).bias.fill_(4.0)
    block.get_submodule(branch).bias.fill_(60000.0)
    sizes = small_models
    inputs = {
        "hidden_states": torch.randn(sizes.BATCH, sizes.TOKENS, sizes.WIDE).half(),
        "encoder_hidden_states": torch.randn(sizes.BATCH, sizes.TEXT, sizes.WIDE).half(),
        "temb": torch.randn(sizes.BATCH, sizes.WIDE).half(),
    }
    if name == "Qwen-Image":
        inputs["encoder_hidden_states_mask"] = None
    case = Case(block, inputs)
    text = sizes.BATCH * sizes.TEXT * sizes.WIDE
    expected, actual = case.run()[:text], accelerated(blocks, case).run()[:text]
    assert (actual == 65504).float().mean() > 0.9
    assert torch.equal(actual, expected)


@torch.no_grad()
def test_wan_in_bfloat16_with_modules_that_are_kept_in_float32(blocks):
    case = small_models.wan()
    expected = case.run()
    lower = case.in_dtype(torch.bfloat16)
    for name, parameter in [*lower.model.named_parameters(), *lower.model.named_buffers()]:
        if not set(name.split(".")).isdisjoint(lower.model._keep_in_fp32_modules):  # as from_pretrained does
            parameter.data = parameter.data.float()
    faster = accelerated(blocks, lower)
    assert 0 < error(faster.run(), expected) <= 1.1 * error(lower.run(), expected)
    assert faster.model.kernels["gate_residual_ada_norm"] >= 4
