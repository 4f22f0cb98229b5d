"""Compare the layers that kernelize installs with those of the models."""

import copy

import pytest
import torch
import torch.nn.functional as F
from reference_adaln import PROJECT, kernel, leaves
from testing import DEVICE, DTYPES, kernelized, random


class FP32LayerNorm(torch.nn.LayerNorm):
    """The module of diffusers."""

    def forward(self, inputs):
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        return F.layer_norm(inputs.float(), self.normalized_shape, weight, bias, self.eps).to(inputs.dtype)


class AdaLayerNorm(torch.nn.Module):
    """The common part of diffusers' modules of this name."""

    def __init__(self, size, chunks, affine=False):
        super().__init__()
        self.emb = None
        self.silu = torch.nn.SiLU()
        self.linear = torch.nn.Linear(size, chunks * size)
        self.norm = torch.nn.LayerNorm(size, elementwise_affine=affine, eps=1e-6)


class AdaLayerNormZero(AdaLayerNorm):
    def forward(self, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None):
        shift, scale, *others = self.linear(self.silu(emb)).chunk(6, dim=1)
        return (self.norm(x) * (1 + scale[:, None]) + shift[:, None], *others)


class AdaLayerNormZeroSingle(AdaLayerNorm):
    def forward(self, x, emb=None):
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate


class AdaLayerNormContinuous(AdaLayerNorm):
    def forward(self, x, conditioning_embedding):
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layer", "module", "named"),
    [
        ("LayerNorm", lambda: torch.nn.LayerNorm(64), None),
        ("LayerNorm", lambda: torch.nn.LayerNorm(64, eps=0.5, elementwise_affine=False), None),
        ("FP32LayerNorm", lambda: FP32LayerNorm(64), None),
        ("FP32LayerNorm", lambda: FP32LayerNorm(64, bias=False), None),
        ("AdaLayerNormZero", lambda: AdaLayerNormZero(64, 6), "emb"),
        ("AdaLayerNormZeroSingle", lambda: AdaLayerNormZeroSingle(64, 3), "emb"),
        ("AdaLayerNormContinuous", lambda: AdaLayerNormContinuous(64, 2), "conditioning_embedding"),
        ("AdaLayerNormContinuous", lambda: AdaLayerNormContinuous(64, 2, affine=True), "conditioning_embedding"),
    ],
)
def test_layers_of_models(layer, module, named, dtype):
    module = module().to(DEVICE, dtype)
    x = random(2, 5, 64, dtype=dtype, requires_grad=True)
    embedding = {} if named is None else {named: random(2, 64, dtype=dtype)}

    def run(module, x, embedding):
        results = module(x, **embedding)
        results = results if isinstance(results, tuple) else (results,)
        wanted = [x, *module.parameters()]
        return results, torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results])

    # In float32: the CPU's LayerNorm rounds the gradients of weights to 16 bits after each row.
    wide = copy.deepcopy(module).float(), *leaves(x.float()), {k: v.float() for k, v in embedding.items()}
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for actual, other in zip(run(kernelized(module, PROJECT, layer), x, embedding), run(*wide)):
        torch.testing.assert_close(actual, other, **close, check_dtype=False)
        assert all(a.dtype == dtype for a in actual)


def test_layer_takes_parameters_of_another_dtype():
    x, norm = random(2, 5, 64, dtype=torch.bfloat16), FP32LayerNorm(64).to(DEVICE, torch.float16)
    expected = norm(x)
    torch.testing.assert_close(kernelized(norm, PROJECT, "FP32LayerNorm")(x), expected)


def test_layer_refuses_more_than_one_dimension():
    norm = torch.nn.LayerNorm((4, 8), elementwise_affine=False)
    with pytest.raises(ValueError, match="normalized_shape"):
        kernel.layers.LayerNorm.forward(norm, torch.zeros(2, 4, 8, device=DEVICE))
