"""`restore` leaves a model exactly as it was, whatever was added to it in between."""

import copy
import pickle
from collections.abc import Mapping

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from example_models import DEVICE, ROUNDING, difference, ltx, qwen3, run
from peft import LoraConfig, get_peft_model

MODELS = pytest.mark.parametrize("make", [ltx, qwen3])


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


@MODELS
def test_classes_attributes_and_pickles(blocks, make):
    model, inputs = make()
    before, pickled, expected = state(model), pickle.dumps(model), run(model, inputs)
    names = list(model.state_dict())
    blocks.accelerate(model)
    assert list(model.state_dict()) == names
    assert state(model) != before
    blocks.restore(model)
    assert state(model) == before
    assert pickle.dumps(model) == pickled
    assert torch.equal(run(model, inputs), expected)
    blocks.restore(model)
    assert state(model) == before


def cpu_offload(model):
    accelerate.cpu_offload(model, execution_device=torch.device(DEVICE))


def model_offload(model):
    accelerate.cpu_offload_with_hook(model, execution_device=DEVICE)


def group_offload(model):
    model.enable_group_offload(onload_device=torch.device(DEVICE), offload_type="block_level", num_blocks_per_group=1)


def remove_group_offload(model):
    for module in model.modules():
        if hasattr(module, "_diffusers_hook"):
            for name in list(module._diffusers_hook.hooks):
                module._diffusers_hook.remove_hook(name, recurse=False)


def remove_offload(model):
    remove_hook_from_module(model, recurse=True)


WRAPPERS = [
    (ltx, cpu_offload, remove_offload),
    (qwen3, cpu_offload, remove_offload),
    (ltx, model_offload, remove_offload),
    (ltx, group_offload, remove_group_offload),
]


@pytest.mark.parametrize("make, wrap, unwrap", WRAPPERS)
def test_offloading_added_and_removed_in_between(blocks, make, wrap, unwrap):
    """Restored while it is wrapped and after, the model runs its own code."""
    model, inputs = make()
    expected = run(model, inputs)
    blocks.accelerate(model)
    wrap(model)
    run(model, inputs)
    blocks.restore(model)
    assert torch.equal(run(model, inputs), expected)
    unwrap(model)
    torch.nn.Module.to(model, DEVICE)  # some leave it on the CPU
    assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize("make, wrap, unwrap", WRAPPERS)
def test_offloading_removed_before(blocks, make, wrap, unwrap):
    model, inputs = make()
    expected = run(model, inputs)
    blocks.accelerate(model)
    wrap(model)
    unwrap(model)
    torch.nn.Module.to(model, DEVICE)
    blocks.restore(model)
    assert torch.equal(run(model, inputs), expected)
    assert_own_forwards(model)


def assert_own_forwards(model):
    """Hooks leave a bound method in the module when they are removed; it must be that of the module's class."""
    for module in model.modules():
        assert "blocks" not in type(module).__mro__[1].__module__
        forward = vars(module).get("forward")
        assert forward is None or "blocks" not in forward.__func__.__module__


def test_forward_that_other_code_kept(blocks):
    model, inputs = ltx()
    expected = run(model, inputs)
    blocks.accelerate(model)
    kept = [(block, block.forward) for block in model.transformer_blocks]
    for block, forward in kept:
        block.forward = lambda *args, forward=forward, **kwargs: forward(*args, **kwargs)
    blocks.restore(model)
    assert torch.equal(run(model, inputs), expected)


def test_hooks_and_adapters_added_in_between_stay(blocks):
    model, inputs = qwen3()
    blocks.accelerate(model)
    calls = []
    model.model.norm.register_forward_hook(lambda *args: calls.append(1))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    fast = run(adapted, inputs)
    blocks.restore(adapted)
    eager = run(adapted, inputs)
    assert len(calls) == 2
    assert (fast - eager).abs().max() < 1e-4
    assert_own_forwards(adapted)


@MODELS
def test_copy_and_pickle_of_an_accelerated_model(blocks, make):
    """A copy is accelerated, too, and independent. A pickle has the original classes, for readers without kernels."""
    model, inputs = make()
    blocks.accelerate(model)
    expected = run(model, inputs)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert [type(module) for module in copied.modules()] == [type(module) for module in model.modules()]
    blocks.restore(model)
    assert torch.equal(run(copied, inputs), expected)
    own = run(model, inputs)
    assert torch.equal(run(loaded, inputs), own)
    assert [type(module) for module in loaded.modules()] == [type(module) for module in model.modules()]
    blocks.restore(copied)
    assert torch.equal(run(copied, inputs), own)


def test_saved_whole_model(blocks, tmp_path):
    model, inputs = ltx()
    own = run(model, inputs)
    blocks.accelerate(model)
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(run(torch.load(tmp_path / "model.pt", weights_only=False), inputs), own)
    model.save_pretrained(tmp_path / "pretrained")
    assert difference(run(type(model).from_pretrained(tmp_path / "pretrained").to(DEVICE), inputs), own) < ROUNDING
