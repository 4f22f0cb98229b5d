"""Norms by the kernels, for all dtypes of input and weight."""

import importlib
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm, RMSNorm
from model_cases import DEVICE, RecordedModel
from torch import nn

pytestmark = pytest.mark.kernels_ci
WIDTH = 48
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Module, class, arguments and options.
NORMS = json.loads(Path(__file__).with_name("norms.json").read_text())
LEFT = {"torch.RMSNorm", "torch.RMSNorm, plain"}  # Their epsilon is that of the dtype.


def norm_named(name):
    torch.manual_seed(0)
    module, cls, arguments, options = NORMS[name]
    norm = getattr(importlib.import_module(module), cls)(*arguments, **options).to(DEVICE)
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
    [nn.LayerNorm, nn.RMSNorm, partial(RMSNorm, eps=1e-5), FP32LayerNorm],
    ids=["torch.LayerNorm", "torch.RMSNorm", "diffusers.RMSNorm", "diffusers.FP32LayerNorm"],
)
def test_norm_over_several_dimensions_is_the_models(blocks, build):
    norm, x = build((4, 8)).to(DEVICE), torch.randn(2, 4, 8, device=DEVICE)
    faster = RecordedModel(blocks, norm)
    torch.testing.assert_close(faster(x), norm(x), rtol=1e-6, atol=1e-6)
