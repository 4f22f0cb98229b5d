"""`restore` leaves a model exactly as it was, whatever was added to it in between."""

import copy
from collections.abc import Mapping

import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from example_models import OFFLOADS, ROUNDING, ltx, own, qwen3, run
from model_cases import DEVICE, error
from peft import LoraConfig, get_peft_model

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")


def state(model):
    """Return the classes and attributes of all modules, tensors by identity."""

    def frozen(value):
        if isinstance(value, torch.nn.Module) or torch.is_tensor(value):
            return id(value)
        if isinstance(value, Mapping):
            return {key: frozen(item) for key, item in value.items()}
        return value

    return {
        name: (type(module), {key: frozen(value) for key, value in vars(module).items()})
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("options", [{}, {"scope": "blocks"}, {"graphs": True}])
def test_classes_and_attributes(blocks, options):
    model, inputs = ltx(layers=1)
    expected = run(model, inputs)
    before = state(model)
    blocks.accelerate(model, **options)
    run(model, inputs)
    assert state(model) != before
    for _ in range(2):
        blocks.restore(model)
        assert state(model) == before
        assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize("when", ["before", "after"])
@torch.no_grad()
def test_compiling_by_the_user_stays(blocks, when):
    """`nn.Module.compile` changes a module in place. The last call counts until the model is restored."""
    model, inputs = own()
    calls = []
    if when == "after":
        blocks.accelerate(model)
        run(model, inputs)
    model.compile(backend=lambda module, _: calls.append(module) or module.forward)
    if when == "before":
        blocks.accelerate(model)
    expected = run(copy.deepcopy(model), inputs)
    assert error(run(model, inputs), expected) < ROUNDING
    blocks.restore(model)
    assert torch.equal(run(model, inputs), expected) and len(calls) == 1


def remove_offload(model):
    remove_hook_from_module(model, recurse=True)
    for module in model.modules():
        if hasattr(module, "_diffusers_hook"):
            for name in list(module._diffusers_hook.hooks):
                module._diffusers_hook.remove_hook(name, recurse=False)
    torch.nn.Module.to(model, DEVICE)  # some leave it on the CPU


@pytest.mark.parametrize("options", [{}, {"graphs": True}])
@pytest.mark.parametrize("wrap", OFFLOADS)
@torch.no_grad()
def test_offloading_added_in_between(blocks, wrap, options):
    """Restored while it is wrapped and after, the model runs its own code."""
    model, inputs = ltx(layers=1)
    expected = run(model, inputs)
    blocks.accelerate(model, **options)
    wrap(model)
    blocks.restore(model)
    assert torch.equal(run(model, inputs), expected)
    remove_offload(model)
    assert torch.equal(run(model, inputs), expected)
    blocks.accelerate(model, **options)
    wrap(model)
    remove_offload(model)
    blocks.restore(model)
    assert torch.equal(run(model, inputs), expected)
    for module in model.modules():
        forward = vars(module).get("forward")  # hooks leave a bound method in the module when they are removed
        assert forward is None or forward.__func__ is type(module).forward


def test_hooks_and_adapters_added_in_between_stay(blocks):
    model, inputs = qwen3(layers=1)
    blocks.accelerate(model)
    calls = []
    model.model.norm.register_forward_hook(lambda *args: calls.append(1))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    fast = run(adapted, inputs)
    blocks.restore(model)
    assert error(fast, run(adapted, inputs)) < ROUNDING
    assert len(calls) == 2


def test_saved_whole_model(blocks, tmp_path):
    model, inputs = ltx(layers=1)
    expected = run(model, inputs)
    blocks.accelerate(model)
    assert error(run(model, inputs), expected) < ROUNDING
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(run(other, inputs), expected)
    model.save_pretrained(tmp_path / "pretrained")
    loaded = type(model).from_pretrained(tmp_path / "pretrained").to(DEVICE)
    assert error(run(loaded, inputs), expected) < ROUNDING
