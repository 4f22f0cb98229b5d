"""CUDA graphs: none outlives a change of the model; hooks, gradients and failed captures leave calls to eager code."""

import copy

import pytest
import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from graph_models import (
    FIRST,
    Wrapped,
    accelerate_on_cpu,
    accelerated_ltx,
    captured_ltx,
    eager,
    is_same,
    ltx,
    ltx_inputs,
    module_of,
    warm,
)
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.overrides import BaseTorchFunctionMode

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")


def lora_layer(model):
    return next(module for module in model.modules() if isinstance(module, LoraLayer))


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


CHANGES = {
    "adapter's scale": lambda model: lora_layer(model).scaling.update(default=3.0),
    "adapter's scale by set_adapters": lambda model: model.set_adapters("default", 0.5),
    "adapters off": lambda model: model.disable_lora(),
    "adapter loaded": lambda model: model.add_adapter(LoraConfig(target_modules=["to_k"]), "second"),
    "adapter deleted": lambda model: model.delete_adapters("default"),
    "adapters unloaded": lambda model: model.unload_lora(),
    "adapter merged": lambda model: lora_layer(model).merge(),
    "dtype": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "parameter": lambda model: setattr(model.proj_out, "weight", nn.Parameter(2 * model.proj_out.weight)),
    "data of a parameter": lambda model: setattr(model.proj_out.weight, "data", 2 * model.proj_out.weight.data),
    "buffer": lambda model: model.proj_out.register_buffer("extra", torch.ones(2)),
    "attribute that is a tensor": lambda model: setattr(model.transformer_blocks[0], "factor", torch.ones(())),
    "training": lambda model: model.transformer_blocks[0].train(),
    "number": lambda model: setattr(model.transformer_blocks[0].norm1, "eps", 1e-2),
    "list": lambda model: model.transformer_blocks[0].listed.append(1),
    "nested": lambda model: model.transformer_blocks[0].listed[0]["deep"].add(4),
    "configuration": lambda model: model.register_to_config(in_channels=9),
    "attention processor": lambda model: model.set_attn_processor(LTXVideoAttnProcessor()),
    "attention backend": lambda model: model.set_attention_backend("native"),
    "object": lambda model: setattr(model.transformer_blocks[0].attn1.processor, "strength", 2),
    "module": lambda model: setattr(model, "proj_out", nn.Linear(64, 8)),
    "more modules": lambda model: model.transformer_blocks.append(copy.deepcopy(model.transformer_blocks[0])),
    "class": lambda model: setattr(model.proj_out, "__class__", Doubled),
    "hook": lambda model: model.proj_out.register_forward_hook(lambda module, args, output: output * 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_graph_outlives_a_change(blocks, name):
    model, inputs = ltx(), ltx_inputs()
    model.add_adapter(LoraConfig(target_modules=["to_q", "proj_out"], init_lora_weights=False))
    model.transformer_blocks[0].factor = torch.ones(())
    model.transformer_blocks[0].listed = [{"deep": {1, 2}}]
    model.requires_grad_(False)
    if name in ("parameter", "data of a parameter", "class", "buffer"):
        model.unload_lora()
    counts = accelerate_on_cpu(blocks, model)
    warm(model, counts, inputs)
    CHANGES[name](model)
    model.requires_grad_(False)
    replays = counts.replays
    model(**inputs)
    assert counts.replays == replays
    (reason,) = counts.eager.keys() - {FIRST}
    assert reason.startswith("the model has changed: ") or reason == "proj_out has hooks"


def test_forward_of_a_class(blocks, monkeypatch):
    model, inputs, counts = captured_ltx(blocks)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: nn.functional.linear(x, self.weight))
    model(**inputs)
    assert counts.eager["the model has changed: the forward of Linear"] == 1


def test_changes_that_graphs_see(blocks):
    model, inputs, counts = captured_ltx(blocks)
    model.load_state_dict({name: weight + 1 for name, weight in model.state_dict().items()})
    model.proj_out.weight.mul_(2)
    model.train(False)
    model.proj_out.register_forward_hook(lambda module, args, output: None).remove()
    model.transformer_blocks[0].norm1.eps = float(repr(model.transformer_blocks[0].norm1.eps))
    replays = counts.replays
    assert is_same(model(**inputs).sample, eager(model, inputs).sample)
    assert counts.replays == replays + 1


def test_capture_begins_anew_after_a_change(blocks):
    model, inputs, counts = captured_ltx(blocks)
    model.transformer_blocks[0].norm1.eps = 1e-2
    model(**inputs)
    assert counts.held == 0
    warm(model, counts, inputs)
    assert (counts.captured, counts.held) == (2, 1)
    assert counts.eager["the model has changed: transformer_blocks.0.norm1.eps"] == 1


class Holder:
    def __init__(self, value):
        self.value = value


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.ones(()), requires_grad=False)
        self.several = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("no", None)
        self.holder = Holder([torch.ones(3)])


def hold(value):
    return lambda layer: setattr(layer.holder, "value", value)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda layer: setattr(layer, "scalar", nn.Parameter(torch.ones(()), requires_grad=False)), "layer.scalar"),
        (lambda layer: setattr(layer, "no", torch.ones(1)), "layer.no"),
        (lambda layer: delattr(layer, "no"), "layer"),
        (lambda layer: setattr(layer.scalar, "data", torch.ones(())), "layer.scalar"),
        (lambda layer: layer._parameters.update(renamed=layer._parameters.pop("several")), "layer"),
        (lambda layer: setattr(layer, "_parameters", {}), "layer"),
        (lambda layer: setattr(layer, "_forward_hooks", {1: print}), "layer"),
        (lambda layer: layer.several.set_(torch.ones(3)), "layer.several"),
        (lambda layer: setattr(layer.holder.value[0], "data", torch.ones(3)), "layer.holder.value.0"),
        *((hold(value), "layer.holder") for value in (torch.ones(3), torch.ones(()), torch.ones(3).numpy())),
        (hold([torch.ones(3)]), "layer.holder"),
    ],
)
def test_tensors_that_were_replaced_by_equal_ones(blocks, change, place):
    """Graphs read the current content of memory, and not that of other tensors."""
    module = Wrapped(Weights())
    snapshot = module_of(blocks, "snapshots").Snapshot(module, torch.device("cpu"))
    module.layer.several.mul_(2).div_(2)
    module.layer.holder.value[0].mul_(2)
    assert snapshot.find_difference(module) is None
    change(module.layer)
    assert place in (snapshot.find_difference(module) or "")


def test_cached_tensors_on_the_host_are_compared_by_version(blocks):
    snapshots = module_of(blocks, "snapshots")
    module = nn.Identity()
    module.table = torch.ones(3)
    snapshot = snapshots.Snapshot(module, torch.device("cuda", 0))
    assert snapshot.find_difference(module) is None
    module.table.add_(1)
    assert snapshot.find_difference(module) is not None
    assert snapshot.find_difference(module) == "table"


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


def test_parameters_on_another_device(blocks):
    snapshot = module_of(blocks, "snapshots").Snapshot(Wrapped(nn.Linear(3, 3)), torch.device("meta"))
    assert snapshot.obstacle == "layer.weight is on cpu, other parameters on meta"
    assert snapshot.find_difference(Wrapped(nn.Linear(3, 3, device="meta"))) is not None


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


def test_function_modes(blocks):
    model, inputs, counts = captured_ltx(blocks)
    with BaseTorchFunctionMode():
        model(**inputs)
    assert [reason for reason in counts.eager if reason.startswith("a function mode")]


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
        self.calls, self.counts = 1, True

    def forward(self, x):
        self.calls += self.counts
        return super().forward(x) * self.calls


WRITES = "it cannot be captured: it writes into its arguments"


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda layer, x: x.add_(1), WRITES),
        (lambda layer, x: x.data.add_(1), WRITES),
        (lambda layer, x: object(), "its output holds a object, which a graph cannot make"),
        (lambda layer, x: setattr(layer, "calls", layer.calls + 1), "the model has changed: layer.calls"),
    ],
)
def test_forwards_that_no_graph_repeats(blocks, monkeypatch, forward, reason):
    monkeypatch.setattr(Counting, "forward", lambda layer, x: (layer.calls + x, forward(layer, x)))
    model, x = Wrapped(Counting()), torch.zeros(2, 3)
    own, other = copy.deepcopy(model), x.clone()
    counts = accelerate_on_cpu(blocks, model)
    for _ in range(3):
        torch.testing.assert_close(model(x)[0], own(other)[0])
        assert torch.equal(x, other)
    assert counts.eager == {FIRST: 1, reason: 2} and counts.held == 0


def test_model_that_its_forwards_change_is_seldom_looked_at(blocks, monkeypatch):
    """A snapshot of a large model takes longer than some forwards. Once they stop, there are graphs."""
    model, x = Wrapped(Counting()), torch.randn(2, 3)
    counts, runner = accelerate_on_cpu(blocks, model), module_of(blocks, "graph_runner")
    taken, snapshot = [], runner.Snapshot
    monkeypatch.setattr(runner, "Snapshot", lambda *arguments: taken.append(1) or snapshot(*arguments))
    for _ in range(100):
        model(x)
    assert counts.eager == {FIRST: 1, "the model has changed: layer.calls": 99}
    assert len(taken) < 12
    model.layer.counts = False
    for _ in range(100):
        model(x)
    assert counts.captured == 1 and counts.replays > 20, counts


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
