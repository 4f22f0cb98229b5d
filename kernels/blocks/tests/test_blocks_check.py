"""`accelerate(model, check=...)`: which of the two models it keeps, and the figures it reports."""

import copy
import json
import math
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from example_models import ltx, own, qwen3
from model_cases import DEVICE, Case, error
from torch import nn
from transformers import DynamicCache

pytestmark = pytest.mark.usefixtures("one_thread")


class Slow(nn.RMSNorm):
    """Its accelerated call is faster, slower, or wrong."""

    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)


@pytest.fixture
def replace(blocks, monkeypatch):
    """Return a function that makes a forward the accelerated call, for one test."""

    def register(forward):
        def compiled(modules, backend):
            backend.report.replaced["Slow", "RMSNorm"] += 1
            return lambda module, x: (module._call_impl if blocks.kernel_set.is_off() else partial(forward, module))(x)

        monkeypatch.setattr(blocks.tracing, "_compiled", compiled)

    return register


def norm(seconds=0.003):
    module = Slow(16, device=DEVICE)
    module.seconds = seconds
    return module


def is_accelerated(model):
    return any(module._compiled_call_impl is not None for module in model.modules())


def check_of(blocks, model):
    return blocks.accelerate(model, check=(torch.randn(4, 16, device=DEVICE),)).check


def test_faster_model_is_kept(blocks, replace):
    replace(nn.RMSNorm.forward)
    model = norm()
    check = check_of(blocks, model)
    assert is_accelerated(model)
    assert check.kept == "accelerated" and check.accelerated_ms < check.eager_ms
    assert check.reference == "float64" and check.accelerated_error == check.eager_error and check.difference == 0


def slower(self, x):
    time.sleep(0.003)
    return nn.RMSNorm.forward(self, x)


def inaccurate(self, x):
    return nn.RMSNorm.forward(self, x) * 1.01


def failing(self, x):
    raise RuntimeError("no such kernel")


INACCURATE = "accelerated, its error exceeds 1.1 times the eager model's"


@pytest.mark.parametrize(
    "forward, reason",
    [
        (slower, "accelerated, it takes"),
        *((lambda *x, by=by: nn.RMSNorm.forward(*x) * by, INACCURATE) for by in (1.01, float("nan"))),
        (failing, "accelerated, the model fails: RuntimeError: no such kernel"),
    ],
)
def test_worse_model_is_restored(blocks, replace, forward, reason):
    replace(forward)
    model = norm(seconds=0.0 if forward is slower else 0.003)
    report = blocks.accelerate(model, check=(torch.randn(4, 16, device=DEVICE),))
    assert report.check.kept == "eager" and report.check.reason.startswith(reason)
    assert not is_accelerated(model)
    assert not report.replaced and report.left == {("Slow", "the check kept the eager model"): 1}
    assert reason in str(report)


@pytest.mark.parametrize("is_checked_before", [False, True])
def test_other_models_of_a_pipeline_stay(blocks, replace, is_checked_before):
    factor, check = torch.ones(1, device=DEVICE), (torch.randn(4, 16, device=DEVICE),)
    replace(lambda *x: nn.RMSNorm.forward(*x) * factor)
    pipeline = SimpleNamespace(components={"transformer": norm(), "transformer_2": norm()})
    if is_checked_before:
        assert blocks.accelerate(pipeline, check=check).replaced == {("Slow", "RMSNorm"): 2}
    else:
        blocks.accelerate(pipeline.components["transformer_2"])
    factor += 0.01
    report = blocks.accelerate(pipeline, check=check)
    assert [is_accelerated(model) for model in pipeline.components.values()] == [False, True]
    assert report.check.kept == "eager" and report.replaced == {("Slow", "RMSNorm"): 1}
    assert report.left == {("Slow", "the check kept the eager model"): 1}


@pytest.mark.parametrize("forward, kept", [(nn.RMSNorm.forward, "accelerated"), (inaccurate, "eager")])
def test_without_reference_both_are_compared_with_each_other(blocks, replace, forward, kept):
    class Large(Slow):
        def __deepcopy__(self, memory):
            raise torch.OutOfMemoryError("no memory")

    replace(forward)
    model = norm()
    model.__class__ = Large
    check = check_of(blocks, model)
    assert check.kept == kept
    assert check.no_reference == "a float64 copy of the model cannot run: OutOfMemoryError: no memory"
    assert check.eager_error is None and check.difference is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_agrees_with_the_report(blocks, dtype):
    model, inputs = own(dtype)
    before = copy.deepcopy(model.state_dict())
    check = blocks.accelerate(model, check=inputs).check
    assert check.reference == ("float64" if dtype == torch.float32 else "float32")
    assert check.accelerated_error <= max(1.1 * check.eager_error, 1e-6)
    assert is_accelerated(model) == (check.kept == "accelerated")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_each_run_gets_its_own_cache(blocks):
    """A model adds the new tokens to the cache that it gets: a second run with it would compute something else."""
    model, inputs = qwen3(layers=1)
    cache = DynamicCache(config=model.config)
    check = blocks.accelerate(model, check={**inputs, "past_key_values": cache, "use_cache": True}).check
    assert check.difference < 1e-5
    assert cache.get_seq_length() == 0


def test_outputs_without_floating_point_numbers(blocks):
    model, x = nn.LayerNorm(16, device=DEVICE), torch.ones(2, 16, device=DEVICE)
    report = blocks.accelerate(model, check=lambda model: model(x) > 0)
    assert report.check.difference is None and report.check.eager_ms > 0


def test_dropout_draws_the_same_numbers(blocks, replace):
    model = nn.Sequential(nn.Dropout(0.5), norm()).train()
    replace(lambda self, x: nn.RMSNorm.forward(self[1], self[0](x)))
    assert check_of(blocks, model).difference == 0


def test_wrong_inputs_leave_the_model_as_it_was(blocks):
    model, _ = own()
    with pytest.raises(TypeError):
        blocks.accelerate(model, check={"no_such_argument": 1})
    assert not is_accelerated(model)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scope", ["model", "blocks"])
@pytest.mark.parametrize("build", [ltx, qwen3])
@torch.no_grad()
def test_accurate_graphs_are_kept(blocks, build, scope, dtype):
    case = Case(*build()).in_dtype(dtype)
    expected = case.model(**case.inputs)[0]
    report = blocks.accelerate(case.model, check=True, scope=scope)
    assert error(case.model(**case.inputs)[0], expected) < (1e-5 if dtype == torch.float32 else 0.02)
    assert report.replaced and not report.left
    assert report.checks and all("times that of the traced graph" in check for check in report.checks)
    assert f"note: {report.checks[0]}" in str(report) and report.checks[0] in report.to_dict()["notes"]
    assert blocks.accelerate(case.model, check=True, scope=scope).checks


@pytest.fixture
def change_eps(blocks, monkeypatch):
    """Return a function that lets all norms of later traces have another `eps`."""

    def register(eps):
        def fuse(module, *options):
            misses = blocks.fusions.fuse(module, *options)
            for norm in module.graph.find_nodes(op="call_function", target=blocks.kernel_set.rmsnorm.rms_norm):
                norm.update_arg(2, eps)
            module.recompile()
            return misses

        monkeypatch.setattr(blocks.tracing, "fuse", fuse)

    return register


@pytest.mark.parametrize("eps", [0.1, math.nan, "1"])
@torch.no_grad()
def test_other_graphs_are_not_used(blocks, change_eps, eps):
    """The inputs of the call are such that only random ones show the error."""
    change_eps(eps)
    model, x = nn.Sequential(nn.RMSNorm(16, eps=1e-6)).to(DEVICE), torch.zeros(4, 16, device=DEVICE)
    weight = model[0].weight.clone()
    report = blocks.accelerate(model, check=True)
    assert torch.equal(model(x), x) and torch.equal(model[0].weight, weight)
    assert report.left == {("Sequential", "the check kept the traced operations"): 1} and not report.replaced
    assert ("the check failed: " if eps == "1" else "on random inputs") in str(report)


def write_to_input(norm, x, out):
    out.copy_(norm(x))


def copy_and_write(norm, x, out):
    copied = x.to(torch.float32, copy=True)
    copied.zero_()
    return norm(x) + copied


def cast_integers(norm, x, out):
    rows = torch.arange(len(x), device=x.device)
    return norm(x) * rows[:, None].float() + (1.0 - (rows > 1).to(x.dtype))[:, None]


def return_larger(norm, x, out):
    return norm(x), 1e5 * x


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("function", [write_to_input, copy_and_write, cast_integers, return_larger])
@torch.no_grad()
def test_graphs_with_writes_casts_and_several_outputs(blocks, change_eps, function, is_right):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)

        def forward(self, x, out):
            return function(self.norm, x, out)

    if not is_right:
        change_eps(1e-2)
    model = Model().to(DEVICE)
    report = blocks.accelerate(model, check=True)
    model(torch.randn(4, 16, device=DEVICE), torch.empty(4, 16, device=DEVICE))
    assert bool(report.replaced) == is_right and bool(report.left) != is_right, report


@torch.no_grad()
def test_checked_graphs_of_several_lengths(blocks):
    model, tokens = qwen3()[0], torch.arange(3, 12, device=DEVICE)[None]
    expected = [model(tokens[:, :length], use_cache=False).logits for length in (5, 7, 9)]
    report = blocks.accelerate(model, check=True)
    for length, logits in zip((5, 7, 9), expected):
        assert error(model(tokens[:, :length], use_cache=False).logits, logits) < 1e-5
    assert len(report.checks) == 2 and not report.left


def test_graphs_with_checkpoints_keep_the_kernels(blocks):
    model, inputs = qwen3()
    model.train().gradient_checkpointing_enable()
    report = blocks.accelerate(model, check=True)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert report.replaced and "not checked" in report.checks[0]


@torch.no_grad()
def test_outputs_of_other_sizes_in_float64(blocks):
    class Bits(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x).view(torch.int32).view(torch.float32)

    model, x = Bits(16, eps=1e-6).to(DEVICE), torch.randn(2, 16, device=DEVICE)
    expected = model(x)
    report = blocks.accelerate(model, check=True)
    assert torch.equal(model(x), expected) and "the check failed" in str(report)


@torch.no_grad()
def test_checked_models_write_to_copies(blocks):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(16, eps=1e-6)
            self.register_buffer("calls", torch.zeros(1))
            self.steps = nn.Parameter(torch.zeros(1))

        def forward(self, x, out):
            self.calls += 1
            self.steps += 1
            return out.copy_(self.norm(x))

    model, x, out = Counting().to(DEVICE), torch.randn(4, 16, device=DEVICE), torch.empty(4, 16, device=DEVICE)
    expected = nn.functional.rms_norm(x, [16], eps=1e-6)
    blocks.accelerate(model, check=True)
    for calls in (1, 2):
        torch.testing.assert_close(model(x, out), expected)
        torch.testing.assert_close(out, expected)
        assert model.calls == model.steps == calls
