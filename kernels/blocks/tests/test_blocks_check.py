"""`accelerate(model, check=...)`: which of the two models it keeps, and the figures it reports."""

import copy
import json
import time

import pytest
import torch
from example_models import DEVICE, ltx, qwen3, run
from torch import nn
from transformers import DynamicCache


class Slow(nn.RMSNorm):
    """Replaced by a faster forward, or one that is slower, or wrong."""

    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)


@pytest.fixture
def replace(blocks, monkeypatch):
    """Return a function that makes a forward the replacement of the class above, for one test."""
    own = blocks.acceleration.find

    def register(forward):
        replacement = blocks.replacements.Replacement("something", ("rmsnorm",), forward)
        monkeypatch.setattr(
            blocks.acceleration,
            "find",
            lambda module: (replacement, None) if type(module) is Slow else own(module),
        )

    return register


def norm(seconds=0.0):
    module = Slow(16, device=DEVICE)
    module.seconds = seconds
    return module


def is_accelerated(blocks, model):
    return any(blocks.replacements.replacement_in(module) is not None for module in model.modules())


def test_faster_model_is_kept(blocks, replace):
    replace(nn.RMSNorm.forward)
    model = norm(seconds=0.003)
    check = blocks.accelerate(model, check=(torch.randn(4, 16, device=DEVICE),)).check
    assert is_accelerated(blocks, model)
    assert check.kept == "accelerated" and check.accelerated_ms < check.eager_ms
    assert check.reference == "float64" and check.accelerated_error == check.eager_error and check.difference == 0


def slower(self, x):
    time.sleep(0.003)
    return nn.RMSNorm.forward(self, x)


def inaccurate(self, x):
    return nn.RMSNorm.forward(self, x) * 1.01


def not_finite(self, x):
    return nn.RMSNorm.forward(self, x) * float("nan")


def failing(self, x):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    "forward, reason",
    [
        (slower, "accelerated, it takes"),
        (inaccurate, "accelerated, its error exceeds 1.1 times the eager model's"),
        (not_finite, "accelerated, its error exceeds 1.1 times the eager model's"),
        (failing, "accelerated, the model fails: RuntimeError: no such kernel"),
    ],
)
def test_worse_model_is_restored(blocks, replace, forward, reason):
    replace(forward)
    model = norm(seconds=0.0 if forward is slower else 0.003)
    report = blocks.accelerate(model, check=(torch.randn(4, 16, device=DEVICE),))
    assert report.check.kept == "eager" and report.check.reason.startswith(reason)
    assert not is_accelerated(blocks, model)
    assert not report.replaced and report.left == {("Slow", "the check kept the model as it was"): 1}
    assert reason in str(report)


def test_what_is_slower_is_taken_out_alone(blocks, replace):
    replace(slower)
    model = nn.Sequential(norm(), nn.LayerNorm(16, device=DEVICE))
    report = blocks.accelerate(model, check=(torch.randn(4, 16, device=DEVICE),))
    assert report.left["Slow", "the check found the model faster without its replacement"] == 1
    assert blocks.replacements.replacement_in(model[0]) is None
    assert report.shares["Slow", "the check found the model faster without its replacement"] > 0
    assert "% of the time" in str(report) and report.to_dict()["left"][0]["share"] > 0


@pytest.mark.parametrize("forward, kept", [(None, "accelerated"), (inaccurate, "eager")])
def test_without_reference_both_are_compared_with_each_other(blocks, replace, monkeypatch, forward, kept):
    replace(forward or nn.RMSNorm.forward)
    monkeypatch.setattr(blocks.comparison, "_free_memory", lambda tensors: 0)
    check = blocks.accelerate(norm(seconds=0.003), check=(torch.randn(4, 16, device=DEVICE),)).check
    assert check.kept == kept
    assert check.no_reference == "a float64 copy of the model does not fit in memory"
    assert check.eager_error is None and check.difference is not None


@pytest.mark.parametrize("make", [ltx, qwen3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_public_model(blocks, make, dtype):
    """The accelerated model is as accurate as the eager one, and its state agrees with the report."""
    model, inputs = make(dtype, layers=1)
    before = copy.deepcopy(model.state_dict())
    check = blocks.accelerate(model, check=inputs).check
    assert check.reference == ("float64" if dtype == torch.float32 else "float32")
    assert check.accelerated_error <= max(1.1 * check.eager_error, 1e-6)
    assert is_accelerated(blocks, model) == (check.kept == "accelerated")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_function_that_runs_the_model(blocks):
    model, inputs = ltx(layers=1)
    check = blocks.accelerate(model, check=lambda model: run(model, inputs)).check
    assert check.reference == "float64" and check.accelerated_error < 1e-6


def test_each_run_gets_its_own_cache(blocks):
    """A model adds the new tokens to the cache that it gets: a second run with it would compute something else."""
    model, inputs = qwen3(layers=1)
    cache = DynamicCache(config=model.config)
    check = blocks.accelerate(model, check={**inputs, "past_key_values": cache, "use_cache": True}).check
    assert check.difference < 1e-5
    assert cache.get_seq_length() == 0


def test_outputs_without_floating_point_numbers(blocks):
    model, _ = qwen3(layers=1)
    ids = torch.arange(4, device=DEVICE)[None]
    report = blocks.accelerate(model, check=lambda model: model.generate(ids, max_new_tokens=2, do_sample=False))
    assert report.check.difference is None and report.check.eager_ms > 0


def test_dropout_draws_the_same_numbers(blocks, replace):
    replace(nn.RMSNorm.forward)
    model = nn.Sequential(nn.Dropout(0.5), norm(seconds=0.003)).train()
    state = torch.get_rng_state()
    check = blocks.accelerate(model, check=(torch.randn(4, 16, device=DEVICE),)).check
    assert check.difference == 0
    torch.set_rng_state(state)


def test_wrong_inputs_leave_the_model_as_it_was(blocks):
    model, _ = ltx()
    with pytest.raises(TypeError):
        blocks.accelerate(model, check={"no_such_argument": 1})
    assert not is_accelerated(blocks, model)


def test_check_with_graphs(blocks):
    """Both are measured as they will run. Without a GPU no graph is captured, which the report says."""
    model, inputs = ltx(layers=1)
    own = type(model)
    report = blocks.accelerate(model, check=inputs, graphs=True)
    assert report.check.accelerated_error < 1e-6
    assert bool(report.graphs) == (report.check.kept == "accelerated")
    assert json.loads(json.dumps(report.to_dict()))["graphs"].keys() == report.graphs.keys()
    assert (type(model) is own) == (not report.graphs)
    blocks.restore(model)
    assert type(model) is own
