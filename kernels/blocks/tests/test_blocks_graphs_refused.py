"""Calls that CUDA graphs leave to eager code: hooks, gradients, modules with counters, failed captures."""

import copy

import pytest
import torch
from graph_models import (
    FIRST,
    Wrapped,
    accelerate_on_cpu,
    accelerated_ltx,
    eager,
    is_same,
    ltx,
    ltx_inputs,
    module_of,
    warm,
)
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")


def test_hooks_inside(blocks):
    model, inputs, counts = accelerated_ltx(blocks)
    handle = model.transformer_blocks[0].register_forward_hook(lambda module, args, output: output)
    for _ in range(3):
        model(**inputs)
    assert counts.eager == {"transformer_blocks.0 has hooks": 3}
    assert counts.note == "transformer_blocks.0 has hooks"
    handle.remove()
    warm(model, counts, inputs)
    assert counts.note is None


def test_obstacle_is_looked_for_where_it_was(blocks):
    snapshots = module_of(blocks, "snapshots")
    model = ltx()
    hooked = model.transformer_blocks[1].attn1
    handle = hooked.register_forward_hook(lambda module, args, output: output)
    snapshot = snapshots.Snapshot(model, torch.device("cpu"))
    assert snapshot.obstacle == "transformer_blocks.1.attn1 has hooks"
    model.transformer_blocks[0].norm1.eps = 1e-2
    assert snapshot.find_difference(model) is None, "nothing else matters"
    model.transformer_blocks[1].attn1 = copy.deepcopy(model.transformer_blocks[0].attn1)
    assert snapshot.find_difference(model) is not None
    model.transformer_blocks[1].attn1 = hooked
    assert snapshot.find_difference(model) is None
    handle.remove()
    assert snapshot.find_difference(model) is not None
    assert snapshot.find_difference(model) == "'transformer_blocks.1.attn1 has hooks' is no longer true"
    on_another = snapshots.Snapshot(Wrapped(nn.Linear(3, 3)), torch.device("meta"))
    assert on_another.obstacle == "layer.weight is on cpu, other parameters on meta"
    assert on_another.find_difference(Wrapped(nn.Linear(3, 3))) is None
    assert on_another.find_difference(Wrapped(nn.Linear(3, 3, device="meta"))) is not None


def test_hooks_of_the_model_itself_run_around_a_replay(blocks):
    model, inputs, counts = accelerated_ltx(blocks)
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    warm(model, counts, inputs)
    model(**inputs)
    assert len(seen) == 4
    assert counts.replays == 2


def test_gradients(blocks):
    model, inputs, counts = accelerated_ltx(blocks)
    with torch.enable_grad():
        model.requires_grad_(True)
        model(**inputs).sample.sum().backward()
        model.requires_grad_(False)
        model(**{**inputs, "hidden_states": inputs["hidden_states"].requires_grad_()}).sample.sum().backward()
    assert counts.eager == {"gradients are needed": 2}


def test_failed_capture(blocks):
    model, inputs = ltx(), ltx_inputs()
    counts = accelerate_on_cpu(blocks, model, error="it cannot be captured: it waits")
    outputs = [model(**inputs).sample for _ in range(4)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert counts.eager == {FIRST: 1, "it cannot be captured: it waits": 3}
    assert "3 x eager: it cannot be captured: it waits" in str(counts)


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.calls = 0
        self.counts = True

    def forward(self, x):
        self.calls += self.counts
        return super().forward(x) * self.calls


class Writing(nn.Linear):
    def forward(self, x):
        result = super().forward(x)
        (x.data if self.bias is None else x).add_(1)
        return result


class Thing:
    pass


class Strange(nn.Linear):
    def forward(self, x):
        return super().forward(x), Thing()


def test_forward_that_counts(blocks):
    model, x = Wrapped(Counting()), torch.randn(2, 3)
    counts = accelerate_on_cpu(blocks, model)
    first = model(x)
    torch.testing.assert_close(model(x), 2 * first)
    torch.testing.assert_close(model(x), 3 * first)
    assert counts.eager == {FIRST: 1, "the model has changed: layer.calls": 2}


def test_model_that_its_forwards_change_is_seldom_looked_at(blocks, monkeypatch):
    """A snapshot of a large model takes longer than some forwards. Once they stop, there are graphs."""
    model, x = Wrapped(Counting()), torch.randn(2, 3)
    counts, captures = accelerate_on_cpu(blocks, model), module_of(blocks, "captures")
    taken, snapshot = [], captures.Snapshot
    monkeypatch.setattr(captures, "Snapshot", lambda *arguments: taken.append(1) or snapshot(*arguments))
    for _ in range(100):
        model(x)
    assert counts.eager == {FIRST: 1, "the model has changed: layer.calls": 99}
    assert len(taken) < 12
    model.layer.counts = False
    for _ in range(100):
        model(x)
    assert counts.captured == 1 and counts.replays > 20, counts


@pytest.mark.parametrize("bias", [False, True])
def test_forward_that_writes_into_its_argument(blocks, bias):
    model, x = Wrapped(Writing(3, 3, bias)), torch.zeros(2, 3)
    counts = accelerate_on_cpu(blocks, model)
    for _ in range(4):
        model(x)
    assert torch.equal(x, torch.full((2, 3), 4.0))
    assert counts.eager["it cannot be captured: it writes into its arguments"] == 3
    assert counts.held == 0


def test_output_that_a_graph_cannot_make(blocks):
    model, x = Wrapped(Strange(3, 3)), torch.zeros(2, 3)
    counts = accelerate_on_cpu(blocks, model)
    for _ in range(3):
        model(x)
    assert counts.eager == {FIRST: 1, "its output holds a Thing, which a graph cannot make": 2}


def test_errors_of_the_model_are_the_callers(blocks):
    model = Wrapped(nn.Linear(3, 3))
    accelerate_on_cpu(blocks, model)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.zeros(2, 4))


@pytest.mark.parametrize("make", [lambda: torch.randn(1, 3).expand(5, 3), lambda: torch.randn(7).unfold(0, 3, 2)])
def test_arguments_whose_elements_share_memory(blocks, make):
    model = Wrapped(nn.Linear(3, 3))
    counts = accelerate_on_cpu(blocks, model)
    for _ in range(3):
        x = make()
        assert is_same(model(x), eager(model, {"x": x}))
    assert counts.replays == 1
