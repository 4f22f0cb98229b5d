"""Compare the layers that kernelize installs with those of the models."""

import pytest
import torch
import torch.nn.functional as F
from kernels import (
    LocalLayerRepository,
    Mode,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from reference_geglu import DEVICE, PROJECT, kernel, random


class Projected(torch.nn.Module):
    """The GEGLU of diffusers."""

    def __init__(self, width, hidden):
        super().__init__()
        self.proj = torch.nn.Linear(width, 2 * hidden)

    def forward(self, hidden_states, *args, **kwargs):
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * F.gelu(gate)


class GELUActivation(torch.nn.Module):
    approximate = "none"

    def forward(self, x):
        return F.gelu(x, approximate=self.approximate)


class GELUTanh(GELUActivation):
    approximate = "tanh"


class MLP(torch.nn.Module):
    """The GemmaMLP of transformers."""

    def __init__(self, width, hidden, act_fn):
        super().__init__()
        self.gate_proj = torch.nn.Linear(width, hidden, bias=False)
        self.up_proj = torch.nn.Linear(width, hidden, bias=False)
        self.down_proj = torch.nn.Linear(hidden, width, bias=False)
        self.act_fn = act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def kernelized(layer, name):
    """Return `layer` with the kernel's `forward`, put there by kernelize."""
    marked = use_kernel_forward_from_hub(name)(
        type("Marked", (type(layer),), {})
    )  # a new class, because marking changes it
    layer.__class__ = marked
    model = torch.nn.Sequential(layer).to(DEVICE)
    mapping = {name: {DEVICE: LocalLayerRepository(PROJECT, layer_name=name)}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=DEVICE, use_fallback=False)
    assert layer.forward.__func__ is getattr(kernel.layers, name).forward
    return layer


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("GEGLU", lambda: Projected(16, 48)),
        ("GemmaMLP", lambda: MLP(16, 48, GELUTanh())),
        ("GemmaMLP", lambda: MLP(16, 48, GELUActivation())),
    ],
)
def test_layers(name, layer):
    layer = layer().to(DEVICE)
    x = random(5, 16, dtype=torch.float32)
    expected = layer(x)
    torch.testing.assert_close(kernelized(layer, name)(x), expected)


def test_layer_refuses_other_activations():
    layer = kernelized(MLP(16, 48, torch.nn.SiLU()), "GemmaMLP")
    with pytest.raises(ValueError, match=r"act_fn must be one of .*, not SiLU"):
        layer(random(5, 16, dtype=torch.float32))
