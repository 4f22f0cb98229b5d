"""Modules that do not look as a replacement expects keep their forward, and the report says why."""

import pytest
import torch
from example_models import DEVICE, ROUNDING, accelerated, difference, ltx, run
from text_models import OurOps
from torch import nn
from transformers.activations import ACT2FN

BLOCK = "LTXVideoTransformerBlock"


def reasons(report):
    return {reason for name, reason in report.left if name == BLOCK}


def test_forward_of_other_code(blocks):
    model, inputs = ltx()
    expected = run(model, inputs)
    for block in model.transformer_blocks:
        block.forward = lambda *args, own=block.forward, **kwargs: own(*args, **kwargs) + 1
    changed = run(model, inputs)
    report = blocks.accelerate(model)
    assert reasons(report) == {"its forward was replaced by other code"}
    assert difference(run(model, inputs), changed) < ROUNDING
    assert difference(changed, expected) > 0.01


def test_forward_with_other_parameters(blocks, monkeypatch):
    """As in a release of the library that gives the forward another parameter."""
    model, inputs = ltx()
    cls = type(model.transformer_blocks[0])
    own = cls.forward

    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb, encoder_attention_mask, scale=2):
        return own(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb, encoder_attention_mask) * scale

    monkeypatch.setattr(cls, "forward", forward)
    expected = run(model, inputs)
    report = blocks.accelerate(model)
    assert reasons(report) == {"its forward was replaced by other code"}
    assert difference(run(model, inputs), expected) < ROUNDING


def test_another_structure(blocks):
    model, inputs = ltx()
    for block in model.transformer_blocks:
        block.attn1.norm_q = nn.Identity()
        block.attn2.norm_k = nn.Identity()
    assert difference(run(accelerated(blocks, model), inputs), run(model, inputs)) < ROUNDING
    del model.transformer_blocks[0].attn1.norm_q
    with pytest.raises(AttributeError, match="norm_q"):  # the model's own error
        run(accelerated(blocks, model), inputs)


def test_module_that_is_exchanged_afterwards(blocks):
    """A norm that is put in place of one inside a replaced block is called."""

    class Doubled(nn.RMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    model, inputs = ltx()
    fast = accelerated(blocks, model)
    for transformer in (model, fast):
        for block in transformer.transformer_blocks:
            block.norm1 = Doubled(32, eps=1e-6, elementwise_affine=False)
    assert difference(run(fast, inputs), run(model, inputs)) < ROUNDING


def test_classes_keep_their_names(blocks):
    model, _ = ltx()
    before = [(type(module).__module__, type(module).__qualname__) for module in model.modules()]
    fast = accelerated(blocks, model)
    assert [(type(module).__module__, type(module).__qualname__) for module in fast.modules()] == before
    assert all(isinstance(ours, type(own)) for ours, own in zip(fast.modules(), model.modules()))
    assert repr(fast) == repr(model)
    assert torch.nn.Module in type(fast.transformer_blocks[0]).__mro__


class GatedMLP(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16), nn.Linear(8, 16)
        self.activation = ACT2FN[activation]

    def forward(self, x):
        return self.activation(self.gate(x)) * self.up(x)


class TwoStepMLP(GatedMLP):
    def forward(self, x):
        up = self.up(x)
        gate = self.activation(self.gate(x))
        return gate * up


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("mlp", [GatedMLP, TwoStepMLP])
@torch.no_grad()
def test_gates_do_not_go_to_the_epilogue_of_their_projection(blocks, monkeypatch, mlp, activation):
    """On a GPU a GELU of a projection has a place in its epilogue; the kernel that also multiplies comes first."""
    monkeypatch.setattr(blocks.projections, "HAS_EPILOGUE", True)
    model, x = mlp(activation).to(DEVICE), torch.randn(3, 8, device=DEVICE)
    expected = model(x)
    blocks.accelerate(model)
    with OurOps() as ops:
        assert difference(model(x), expected) < ROUNDING
    assert ops.names & {"geglu_pair", "swiglu_pair"}


class Projected(nn.Module):
    def __init__(self, approximate):
        super().__init__()
        self.project, self.approximate = nn.Linear(8, 16), approximate

    def forward(self, hidden):
        hidden = self.project(hidden)
        return nn.functional.gelu(hidden, approximate=self.approximate)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@torch.no_grad()
def test_modules_of_a_projection_and_its_gelu(blocks, monkeypatch, approximate):
    """On a GPU the tanh approximation has a place in the epilogue of a projection; a patch of the class is seen."""
    monkeypatch.setattr(blocks.projections, "HAS_EPILOGUE", True)
    model, x = Projected(approximate).to(DEVICE), torch.randn(3, 8, device=DEVICE)
    expected = model(x)
    report = blocks.accelerate(model)
    assert list(report.replaced) == [("Projected", EPILOGUE)] * (approximate == "tanh")
    assert torch.equal(model(x), expected)  # float32 has no epilogue
    model, x = model.bfloat16(), x.bfloat16()
    assert difference(model(x).float(), expected) < 0.02
    monkeypatch.setattr(Projected, "forward", lambda self, hidden: self.project(hidden))
    assert torch.equal(model(x), model.project(x))


EPILOGUE = "GELU in the epilogue of its projection"


@torch.no_grad()
def test_feed_forwards_of_diffusers(blocks, monkeypatch):
    """LTX-Video's, Wan's and Flux's are modules with a projection inside."""
    activations = pytest.importorskip("diffusers.models.activations")
    monkeypatch.setattr(blocks.projections, "HAS_EPILOGUE", True)
    report = blocks.accelerate(activations.GELU(8, 16, approximate="tanh"))
    assert report.replaced == {("GELU", EPILOGUE): 1}
