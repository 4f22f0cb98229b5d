"""Norms that are replaced alone, beside the public classes, for all dtypes of input and weight."""

import importlib

import pytest
import torch
from example_models import DEVICE
from torch import nn

pytestmark = pytest.mark.kernels_ci
WIDTH = 48

TRANSFORMERS = [
    "gemma.GemmaRMSNorm",
    "gemma2.Gemma2RMSNorm",
    "gemma3.Gemma3RMSNorm",
    "llama.LlamaRMSNorm",
    "mistral.MistralRMSNorm",
    "olmo2.Olmo2RMSNorm",
    "olmo3.Olmo3RMSNorm",
    "phi3.Phi3RMSNorm",
    "qwen2.Qwen2RMSNorm",
    "qwen2_5_vl.Qwen2_5_VLRMSNorm",
    "qwen3.Qwen3RMSNorm",
    "qwen3_vl.Qwen3VLTextRMSNorm",
    "t5.T5LayerNorm",
    "umt5.UMT5LayerNorm",
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def public(path, *args, **kwargs):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


def of_transformers(name):
    model, _ = name.split(".")
    return public(f"transformers.models.{model}.modeling_{name}", WIDTH, eps=1e-5)


NORMS = {
    **{name: lambda name=name: of_transformers(name) for name in TRANSFORMERS},
    "torch.RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "torch.RMSNorm, eps": lambda: nn.RMSNorm(WIDTH, eps=1e-3),
    "torch.RMSNorm, plain": lambda: nn.RMSNorm(WIDTH, elementwise_affine=False),
    "torch.LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "torch.LayerNorm, no bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "torch.LayerNorm, plain": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "diffusers.RMSNorm": lambda: public("diffusers.models.normalization.RMSNorm", WIDTH, 1e-5),
    "diffusers.RMSNorm, bias": lambda: public("diffusers.models.normalization.RMSNorm", WIDTH, 1e-5, bias=True),
    "diffusers.RMSNorm, plain": lambda: public(
        "diffusers.models.normalization.RMSNorm", WIDTH, 1e-5, elementwise_affine=False
    ),
    "diffusers.FP32LayerNorm": lambda: public("diffusers.models.normalization.FP32LayerNorm", WIDTH, eps=1e-5),
}


def norm_named(name):
    torch.manual_seed(0)
    norm = NORMS[name]().to(DEVICE)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("name", NORMS)
def test_norm(blocks, name):
    """The replacement has eager's dtype and accuracy, forward and backward, for every pair of dtypes."""
    for dtype in DTYPES:
        for weight_dtype in (dtype, torch.float32, torch.bfloat16):
            x = torch.randn(2, 5, WIDTH, dtype=dtype, device=DEVICE)
            norm = norm_named(name).to(weight_dtype)
            expected = outcome(norm, x)
            assert sum(blocks.accelerate(norm).replaced.values()) == 1
            ours = outcome(norm, x)
            if expected is None:  # torch.nn.LayerNorm refuses some pairs
                continue
            exact = outcome(norm_named(name).to(weight_dtype).double(), x.double())
            for mine, eager, reference in zip(ours, expected, exact):
                assert mine.dtype == eager.dtype
                error, allowed = ((value.double() - reference).norm() / reference.norm() for value in (mine, eager))
                assert error <= max(1.1 * allowed, 1e-6), (dtype, weight_dtype)


def outcome(norm, x):
    """Return the output of a norm and the gradients of its input and parameters, or None if it takes no such input."""
    x = x.clone().requires_grad_()
    norm.zero_grad()
    try:
        y = norm(x)
    except RuntimeError:
        return None
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y))
    return [y, x.grad, *(parameter.grad for parameter in norm.parameters())]


@pytest.mark.parametrize("name", NORMS)
def test_rows_that_are_not_contiguous_are_the_models(blocks, name):
    norm = norm_named(name)
    x = torch.randn(2, WIDTH, 5, device=DEVICE).transpose(1, 2)
    expected = norm(x)
    blocks.accelerate(norm)
    ours = norm(x)
    assert torch.equal(ours, expected) and ours.stride() == expected.stride()


@pytest.mark.parametrize("name", NORMS)
def test_wrong_width_is_the_models_own_error(blocks, name):
    x = torch.randn(2, WIDTH + 1, device=DEVICE)
    norm = norm_named(name)
    errors = []
    for _ in range(2):
        try:
            norm(x)
        except RuntimeError as error:
            errors.append(str(error))
        blocks.accelerate(norm)
    assert len(errors) in (0, 2) and len(set(errors)) <= 1


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm((4, 8)),
        nn.RMSNorm((4, 8)),
        public("diffusers.models.normalization.RMSNorm", (4, 8), 1e-5),
        public("diffusers.models.normalization.FP32LayerNorm", (4, 8)),
    ],
    ids=["torch.LayerNorm", "torch.RMSNorm", "diffusers.RMSNorm", "diffusers.FP32LayerNorm"],
)
def test_norm_over_several_dimensions_is_left(blocks, norm):
    report = blocks.accelerate(norm)
    assert report.left == {(type(norm).__name__, "it normalizes over several dimensions"): 1}
