"""Norms by the kernels, for all dtypes of input and weight."""

import importlib
from functools import partial

import pytest
import torch
from model_cases import DEVICE, RecordedModel
from torch import nn

pytestmark = pytest.mark.kernels_ci
WIDTH = 48
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TRANSFORMERS = (
    *("gemma.GemmaRMSNorm", "gemma2.Gemma2RMSNorm", "gemma3.Gemma3RMSNorm", "llama.LlamaRMSNorm"),
    *("mistral.MistralRMSNorm", "olmo2.Olmo2RMSNorm", "olmo3.Olmo3RMSNorm", "phi3.Phi3RMSNorm"),
    *("qwen2.Qwen2RMSNorm", "qwen2_5_vl.Qwen2_5_VLRMSNorm", "qwen3.Qwen3RMSNorm", "qwen3_vl.Qwen3VLTextRMSNorm"),
    *("t5.T5LayerNorm", "umt5.UMT5LayerNorm"),
)


def of_transformers(name):
    model, cls = name.split(".")
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), cls)(WIDTH, eps=1e-5)


def of_diffusers(name, *args, module="normalization", **options):
    return getattr(importlib.import_module(f"diffusers.models.{module}"), name)(*args, **options)


NORMS = {
    **{name: lambda name=name: of_transformers(name) for name in TRANSFORMERS},
    "torch.RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "torch.RMSNorm, eps": lambda: nn.RMSNorm(WIDTH, eps=1e-3),
    "torch.RMSNorm, plain": lambda: nn.RMSNorm(WIDTH, elementwise_affine=False),
    "torch.LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "torch.LayerNorm, no bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "torch.LayerNorm, plain": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "diffusers.RMSNorm": lambda: of_diffusers("RMSNorm", WIDTH, 1e-5),
    "diffusers.RMSNorm, bias": lambda: of_diffusers("RMSNorm", WIDTH, 1e-5, bias=True),
    "diffusers.RMSNorm, plain": lambda: of_diffusers("RMSNorm", WIDTH, 1e-5, elementwise_affine=False),
    "diffusers.FP32LayerNorm": lambda: of_diffusers("FP32LayerNorm", WIDTH, eps=1e-5),
    "Krea2RMSNorm": lambda: of_diffusers("Krea2RMSNorm", WIDTH, module="transformers.transformer_krea2"),
}
LEFT = {"torch.RMSNorm", "torch.RMSNorm, plain"}  # Their epsilon is that of the dtype.


def norm_named(name):
    torch.manual_seed(0)
    norm = NORMS[name]().to(DEVICE)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def outcome(norm, x):
    """Return the output of a norm and the gradients of its input and parameters, or None if it takes no such input."""
    x = x.clone().requires_grad_()
    parameters = list(norm.parameters())
    try:
        y = norm(x)
    except RuntimeError:
        return None
    torch.manual_seed(1)
    return [y, *torch.autograd.grad(y, [x, *parameters], torch.randn(y.shape).to(y))]


@pytest.mark.parametrize("name", NORMS)
def test_norm(blocks, name):
    """The kernel has eager's dtype and accuracy, forward and backward, for every pair of dtypes."""
    for dtype in DTYPES:
        for weight_dtype in {dtype, torch.float32, torch.bfloat16}:
            x = torch.randn(2, 5, WIDTH, dtype=dtype, device=DEVICE)
            norm = norm_named(name).to(weight_dtype)
            expected = outcome(norm, x)
            if expected is None:  # torch.nn.LayerNorm refuses some pairs
                continue
            faster = RecordedModel(blocks, norm)
            ours = outcome(faster, x)
            if weight_dtype == (torch.float32 if name == "Krea2RMSNorm" else dtype):
                assert faster.kernels.total() == (name not in LEFT)
            exact = outcome(norm_named(name).to(weight_dtype).double(), x.double())
            for mine, eager, reference in zip(ours, expected, exact):
                assert mine.dtype == eager.dtype
                error, allowed = ((value.double() - reference).norm() / reference.norm() for value in (mine, eager))
                assert error <= max(1.1 * allowed, 1e-6), (dtype, weight_dtype)


@pytest.mark.parametrize("name", NORMS)
def test_rows_that_are_not_contiguous_are_the_models(blocks, name):
    norm = norm_named(name)
    x = torch.randn(2, WIDTH, 5, device=DEVICE).transpose(1, 2)
    faster = RecordedModel(blocks, norm)
    expected, ours = norm(x), faster(x)
    assert torch.equal(ours, expected) and ours.stride() == expected.stride()
    assert not faster.kernels


def test_norm_of_a_norm(blocks):
    faster = RecordedModel(blocks, nn.Sequential(*[norm_named("diffusers.RMSNorm, plain")] * 2))
    faster(torch.randn(2, WIDTH, device=DEVICE))
    assert faster.kernels == {"rms_norm": 2}


@pytest.mark.parametrize(
    "build",
    [nn.LayerNorm, nn.RMSNorm, partial(of_diffusers, "RMSNorm", eps=1e-5), partial(of_diffusers, "FP32LayerNorm")],
    ids=["torch.LayerNorm", "torch.RMSNorm", "diffusers.RMSNorm", "diffusers.FP32LayerNorm"],
)
def test_norm_over_several_dimensions_is_the_models(blocks, build):
    norm, x = build((4, 8)).to(DEVICE), torch.randn(2, 4, 8, device=DEVICE)
    faster = RecordedModel(blocks, norm)
    torch.testing.assert_close(faster(x), norm(x), rtol=1e-6, atol=1e-6)
