"""A user's own model: operations by functions of its module, and its report."""

import copy

import pytest
import torch
from example_models import DEVICE
from torch import nn
from torch.nn.functional import silu

WIDTH = 16


def modulate(x, shift, scale):
    """Return `x` with a scale and a shift for each sample."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def modulate_twice(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1) * scale.unsqueeze(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x, condition):
        scale, shift, gate, scale2, shift2, gate2 = self.modulation(condition).chunk(6, dim=1)
        # The names of the arguments are those of other parameters.
        x = x + gate.unsqueeze(1) * self.first(modulate(self.norm1(x), scale, shift))
        normed = self.norm2(x)
        return x + gate2.unsqueeze(1) * self.second(modulate(normed, scale=scale2, shift=shift2))


class ChangingBlock(Block):
    """Changes tensors in place where the value of no step before it is still to be computed."""

    def forward(self, x, condition):
        x = x + self.first(x)
        normed = self.norm1(x)
        x = x + self.second(normed)
        x *= 0.5
        return x


class ChangingBetween(Block):
    """Changes a part of a sum before the norm of the sum."""

    def forward(self, x, condition):
        branch = self.first(x)
        total = x + branch
        branch.zero_()
        normed = self.norm1(total)
        for part in normed.unbind(1):
            total = total + part[:, None]
            normed = self.norm2(total)
            part.add_(1)
        return normed


class ChangingModule(Block):
    """Changes a part of a sum by a module before the norm of the sum."""

    def __init__(self):
        super().__init__()
        self.activation = nn.SiLU(inplace=True)

    def forward(self, x, condition):
        branch = self.first(x)
        total = x + branch
        return self.second(self.activation(branch)) + self.norm1(total)


class OtherBlock(Block):
    def forward(self, x, condition):
        scale, shift, *_ = self.modulation(condition).chunk(6, dim=1)
        return modulate_twice(self.norm1(x), shift, scale)


class LayerNorm2d(nn.Module):
    """Over the channels of an image."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return (x - x.mean(1, keepdim=True)) * x.var(1, keepdim=True).rsqrt() * self.weight[:, None, None]


class Square(nn.Module):
    def forward(self, x):
        return x.square()


class GatedMLP(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x):
        return self.activation(self.gate(x)) * self.up(x)


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


class QuickMLP(GatedMLP):
    def forward(self, x):
        return quick_gelu(self.gate(x)) * self.up(x)


class FusedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return silu(gate) * up


def conditioned():
    return torch.randn(2, 5, WIDTH, device=DEVICE), torch.randn(2, WIDTH, device=DEVICE)


def outcome(model, *inputs):
    """Return the output, and the gradients of all parameters."""
    model.zero_grad()
    output = model(*inputs)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_a_modulation_by_a_function(blocks, monkeypatch):
    torch.manual_seed(0)
    block, inputs = Block().to(DEVICE), conditioned()
    exact = outcome(copy.deepcopy(block).double(), *(x.double() for x in inputs))
    report = blocks.accelerate(block)
    (does,) = [does for name, does in report.replaced if name == "Block"]
    assert "norm with modulation" in does and "residual sum with gate and norm" in does
    for actual, expected in zip(outcome(block, *inputs), exact):
        assert (actual - expected).norm() < 1e-5 * expected.norm()
    changed = lambda x, shift, scale: x * scale.unsqueeze(1)  # noqa: E731
    monkeypatch.setitem(Block.forward.__globals__, "modulate", changed)
    actual = block(*inputs)
    blocks.restore(block)
    assert (actual - block(*inputs)).norm() < 1e-5 * actual.norm()


@torch.no_grad()
def test_tensors_that_change_in_place(blocks):
    cases = (ChangingBlock, "residual sum with norm"), (ChangingBetween, None), (ChangingModule, None)
    for cls, does in cases:
        block, inputs = cls().to(DEVICE), conditioned()
        expected = block(*inputs)
        report = blocks.accelerate(block)
        assert [operation for name, operation in report.replaced if name == cls.__name__] == [does] * (does is not None)
        torch.testing.assert_close(block(*inputs), expected, rtol=1e-5, atol=1e-5)


def test_a_function_that_computes_something_else(blocks):
    block, inputs = (
        OtherBlock().to(DEVICE),
        (torch.randn(2, 5, WIDTH, device=DEVICE), torch.randn(2, WIDTH, device=DEVICE)),
    )
    expected = block(*inputs)
    report = blocks.accelerate(block)
    assert not [name for name, _ in report.replaced if name == "OtherBlock"]
    torch.testing.assert_close(block(*inputs), expected, rtol=1e-5, atol=1e-5)


def test_what_no_kernel_computes_is_reported(blocks):
    report = blocks.accelerate(nn.Sequential(LayerNorm2d(), QuickMLP(None)))
    assert not report.replaced
    assert dict(report.left) == {
        ("LayerNorm2d", "it computes no norm that a kernel does"): 1,
        ("QuickMLP", "its activation is quick_gelu, which no kernel computes"): 1,
    }


@pytest.mark.parametrize("inaccurate", [False, True])
def test_a_class_of_which_modules_are_left_for_several_reasons_is_timed(blocks, monkeypatch, inaccurate):
    if inaccurate:
        monkeypatch.setattr(blocks.gated, "product", lambda name, gate, up: 1.1 * silu(gate) * up)
    model = nn.Sequential(GatedMLP(Square()), GatedMLP(nn.SiLU())).to(DEVICE)
    report = blocks.accelerate(model, check=(torch.randn(4, WIDTH, device=DEVICE),))
    assert {name for name, _ in report.left} == {"GatedMLP"}
    assert report.shares.keys() == report.left.keys() and all(0 < share < 1 for share in report.shares.values())
    assert len(report.left) == 2 or not inaccurate


def test_halves_of_one_tensor_in_transforms(blocks):
    model, x = FusedMLP().to(DEVICE), torch.randn(4, WIDTH, device=DEVICE)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    ways = torch.func.grad(loss), torch.func.vmap(torch.func.grad(loss), (None, 0))
    expected = [way(parameters, x)["both.weight"] for way in ways]
    assert ("FusedMLP", "activation of the gate, and the product") in blocks.accelerate(model).replaced
    for way, own in zip(ways, expected):
        torch.testing.assert_close(way(parameters, x)["both.weight"], own)
    both = torch.randn(2, 3, 8, WIDTH, device=DEVICE)
    with torch.no_grad():
        joined = torch.func.vmap(lambda x: blocks.projections.joined_tokens(*x.split((2, 6), dim=1), 1))(both)
    torch.testing.assert_close(joined, both)


def test_a_dtype_that_no_kernel_takes_is_noted(blocks):
    note = "the model is in float64, which the kernels do not take: it runs as before"
    assert blocks.accelerate(Block().double().to(DEVICE)).notes == [note]
    assert blocks.accelerate(Block().to(DEVICE)).notes == []
