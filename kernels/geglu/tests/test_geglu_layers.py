"""Compare the layers that kernelize installs with those of the models."""

import math

import pytest
import torch
import torch.nn.functional as F
from reference_geglu import PROJECT, random
from testing import DEVICE, kernelized


class Projected(torch.nn.Module):
    """The GEGLU of diffusers."""

    def __init__(self, width, hidden):
        super().__init__()
        self.proj = torch.nn.Linear(width, 2 * hidden)

    def forward(self, hidden_states, *args, **kwargs):
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * F.gelu(gate)


class ProjectedSiLU(Projected):
    """The SwiGLU of diffusers."""

    def forward(self, hidden_states):
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * F.silu(gate)


def activation(name, function):
    """Return a module whose class has the name of one of transformers'."""
    return type(name, (torch.nn.Module,), {"forward": lambda self, x: function(x)})()


def tanh_by_hand(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATION_MODULES = [
    torch.nn.SiLU(),
    activation("SiLUActivation", F.silu),
    activation("GELUActivation", F.gelu),
    *(
        activation(name, tanh_by_hand)
        for name in ("AccurateGELUActivation", "FastGELUActivation", "GELUTanh", "NewGELUActivation", "PytorchGELUTanh")
    ),
]


class MLP(torch.nn.Module):
    """The MLP of transformers' Llama, Qwen, Gemma and others."""

    def __init__(self, width, hidden, act_fn):
        super().__init__()
        self.gate_proj = torch.nn.Linear(width, hidden, bias=False)
        self.up_proj = torch.nn.Linear(width, hidden, bias=False)
        self.down_proj = torch.nn.Linear(hidden, width, bias=False)
        self.act_fn = act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PackedMLP(torch.nn.Module):
    """The Phi3MLP of transformers."""

    def __init__(self, width, hidden, activation_fn):
        super().__init__()
        self.gate_up_proj = torch.nn.Linear(width, 2 * hidden, bias=False)
        self.down_proj = torch.nn.Linear(hidden, width, bias=False)
        self.activation_fn = activation_fn

    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("GEGLU", lambda: Projected(16, 48)),
        ("SwiGLU", lambda: ProjectedSiLU(16, 48)),
        ("GatedMLP", lambda: MLP(16, 48, activation("GELUTanh", tanh_by_hand))),
        *(
            (name, lambda mlp=mlp, module=module: mlp(16, 48, module))
            for name, mlp in (("GatedMLP", MLP), ("Phi3MLP", PackedMLP))
            for module in ACTIVATION_MODULES
        ),
    ],
)
def test_layers(name, layer):
    layer = layer().to(DEVICE)
    x = random(5, 16, dtype=torch.float32, requires_grad=True)
    expected = layer(x)
    grad = torch.randn_like(expected)
    inputs = [x, *layer.parameters()]
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    actual = kernelized(layer, PROJECT, name)(x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, inputs, grad), expected_grads)


@pytest.mark.parametrize(
    ("name", "mlp", "attribute"), [("GatedMLP", MLP, "act_fn"), ("Phi3MLP", PackedMLP, "activation_fn")]
)
def test_layer_refuses_other_activations(name, mlp, attribute):
    layer = kernelized(mlp(16, 48, torch.nn.ReLU()), PROJECT, name)
    with pytest.raises(ValueError, match=rf"{attribute} must be one of .*, not ReLU"):
        layer(random(5, 16, dtype=torch.float32))
