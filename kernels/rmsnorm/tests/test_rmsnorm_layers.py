"""Compare the layers that kernelize installs with those of the models."""

import pytest
import torch
from reference_rmsnorm import PROJECT, kernel
from testing import DEVICE, DTYPES, kernelized, random


@pytest.mark.kernels_ci
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [None, 0.5])
def test_layer(eps, affine):
    norm, x = torch.nn.RMSNorm(48, eps=eps, elementwise_affine=affine).to(DEVICE), random(5, 48, dtype=torch.float32)
    expected = norm(x)
    torch.testing.assert_close(kernelized(norm, PROJECT, "RMSNorm")(x), expected)


class LlamaNorm(torch.nn.Module):
    """The norm of transformers, whose subclasses are those of other models."""

    epsilon = "variance_epsilon"

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size))
        setattr(self, self.epsilon, eps)

    def normed(self, x):
        return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + getattr(self, self.epsilon))

    def forward(self, hidden_states):
        return self.weight * self.normed(hidden_states).to(hidden_states.dtype)


class Olmo2Norm(LlamaNorm):
    def forward(self, hidden_states):
        return (self.weight * self.normed(hidden_states)).to(hidden_states.dtype)


class GemmaNorm(LlamaNorm):
    epsilon = "eps"

    def forward(self, x):
        return (self.normed(x) * (1.0 + self.weight.float())).type_as(x)


class DiffusersNorm(torch.nn.Module):
    """The norm of diffusers."""

    def __init__(self, size, eps=1e-6, affine=True, bias=False):
        super().__init__()
        self.eps, self.dim = eps, torch.Size([size])
        self.weight = torch.nn.Parameter(torch.randn(size)) if affine else None
        self.bias = torch.nn.Parameter(torch.randn(size)) if bias else None

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        if self.weight is None:
            return hidden_states.to(input_dtype)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        hidden_states = hidden_states * self.weight
        return hidden_states if self.bias is None else hidden_states + self.bias


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("layer", "norm", "options"),
    [
        ("LlamaRMSNorm", LlamaNorm, {}),
        ("LlamaRMSNorm", LlamaNorm, {"eps": 0.5}),
        ("Olmo2RMSNorm", Olmo2Norm, {}),
        ("GemmaRMSNorm", GemmaNorm, {}),
        ("DiffusersRMSNorm", DiffusersNorm, {}),
        ("DiffusersRMSNorm", DiffusersNorm, {"bias": True}),
        ("DiffusersRMSNorm", DiffusersNorm, {"affine": False}),
    ],
)
def test_layers_of_models(layer, norm, options):
    for weight_dtype in DTYPES:
        model = norm(64, **options).to(DEVICE, weight_dtype)
        inputs = [random(2, 5, 64, dtype=dtype, requires_grad=True) for dtype in DTYPES]
        expected = [model(x) for x in inputs]
        kernelized(model, PROJECT, layer)
        for x, e in zip(inputs, expected):
            actual = model(x)
            # An intermediate of a float32 result may have been rounded to 16 bits.
            unit = max(torch.finfo(x.dtype).eps, 1e-6) if e.dtype == torch.float32 else None
            torch.testing.assert_close(actual, e, rtol=unit, atol=unit)
            wanted = [x, *model.parameters()]
            grad = torch.randn_like(e)
            torch.testing.assert_close(
                torch.autograd.grad(actual, wanted, grad), torch.autograd.grad(e, wanted, grad), rtol=0.05, atol=0.05
            )


def test_layer_refuses_more_than_one_dimension():
    norm = torch.nn.RMSNorm((4, 8), elementwise_affine=False)
    with pytest.raises(ValueError, match="normalized_shape"):
        kernel.layers.RMSNorm.forward(norm, torch.zeros(2, 4, 8, device=DEVICE))
    norm = DiffusersNorm(8)
    norm.dim = torch.Size([4, 8])
    with pytest.raises(ValueError, match="dim must be one dimension"):
        kernel.layers.DiffusersRMSNorm.forward(norm, torch.zeros(2, 4, 8, device=DEVICE))
