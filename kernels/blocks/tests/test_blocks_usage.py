"""Accelerated models in use: training, adapters, compiling, offloading, parallelism."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import accelerate
import pytest
import torch
import torch.distributed as dist
from example_models import DEVICE, ROUNDING, accelerated, difference, gradients, left, ltx, qwen3, run
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

MODELS = pytest.mark.parametrize("make", [ltx, qwen3])


@MODELS
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_batches(blocks, make, dtype, batch):
    """Classifier-free guidance runs batches of 2. The error is within 1.1 times the eager model's."""
    model, inputs = make(dtype, batch=batch)
    fast = accelerated(blocks, model)
    wide = nn.Module.to(copy.deepcopy(model), torch.float64 if dtype == torch.float32 else torch.float32)
    exact = run(wide, {key: widened(value, dtype, wide.dtype) for key, value in inputs.items()}).double()
    with torch.no_grad():
        eager, ours = run(model, inputs), run(fast, inputs)
    assert ours.dtype == eager.dtype
    assert difference(ours.double(), exact) <= max(1.1 * difference(eager.double(), exact), 1e-6)


def widened(value, dtype, wide):
    return value.to(wide) if torch.is_tensor(value) and value.dtype == dtype else value


# --- training ---------------------------------------------------------------------------------------------------------


def train(model, inputs):
    model.zero_grad()
    run(model, inputs).square().mean().backward()
    return gradients(model)


def assert_equal_gradients(ours, eager):
    assert ours.keys() == eager.keys() and eager
    scale = max(gradient.norm().item() for gradient in eager.values())
    for name, gradient in eager.items():
        # Some gradients are zero but for rounding, that of the bias of a key projection for example.
        assert (ours[name] - gradient).norm() <= ROUNDING * (gradient.norm() + 0.1 * scale), name


@MODELS
def test_training(blocks, make):
    model, inputs = make(batch=2)
    assert_equal_gradients(train(accelerated(blocks, model).train(), inputs), train(model.train(), inputs))


@MODELS
def test_gradient_checkpointing(blocks, make):
    model, inputs = make()
    expected = train(model.train(), inputs)
    fast = accelerated(blocks, model).train()
    fast.enable_gradient_checkpointing() if make is ltx else fast.gradient_checkpointing_enable()
    assert_equal_gradients(train(fast, inputs), expected)


def with_adapter(model):
    targets = ["to_q", "to_out.0", "net.2"] if hasattr(model, "transformer_blocks") else ["q_proj", "down_proj"]
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    if hasattr(model, "transformer_blocks"):
        model.add_adapter(config)
        return model
    return get_peft_model(model, config)


@MODELS
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters(blocks, make, when):
    model, inputs = make()
    eager = with_adapter(copy.deepcopy(model))
    if when == "before":
        fast = copy.deepcopy(eager)
        assert blocks.accelerate(fast).replaced
    else:
        fast = with_adapter(accelerated(blocks, model))
    assert difference(run(fast, inputs), run(eager, inputs)) < ROUNDING
    assert difference(run(fast, inputs), run(model, inputs)) > 100 * ROUNDING
    ours, expected = train(fast.train(), inputs), train(eager.train(), inputs)
    assert all("lora" in name for name in ours)
    assert_equal_gradients(ours, expected)


# --- compiling --------------------------------------------------------------------------------------------------------


@MODELS
def test_compile(blocks, make):
    """The graph of an accelerated model is that of the model: Inductor fuses its operations, and cannot fuse ours."""
    model, inputs = make(layers=1)
    graphs = []

    def record(graph, example_inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    results = []
    for transformer in (model, accelerated(blocks, model)):
        torch.compiler.reset()
        with torch.no_grad():
            results.append(run(torch.compile(transformer, fullgraph=True, backend=record), inputs))
    eager, ours = graphs
    assert [without_addresses(target) for target in ours] == [without_addresses(target) for target in eager]
    assert torch.equal(*results)


def without_addresses(target):
    return target.split(" at 0x")[0]


def test_export(blocks):
    """An exported model needs no kernels."""
    model, inputs = ltx(layers=1)
    model.forward = functools.partial(model.forward, return_dict=False)
    operations = []
    for transformer in (model, accelerated(blocks, model)):
        exported = torch.export.export(
            transformer, (), {name: x for name, x in inputs.items() if name != "return_dict"}
        )
        operations.append([str(node.target) for node in exported.graph.nodes])
    assert operations[0] == operations[1]


def test_accelerated_after_compiling(blocks):
    model, inputs = ltx(layers=1)
    expected = run(model, inputs)
    compiled = torch.compile(model, backend="eager")
    run(compiled, inputs)
    assert blocks.accelerate(compiled).replaced
    assert difference(run(compiled, inputs), expected) < ROUNDING
    blocks.restore(compiled)
    assert torch.equal(run(compiled, inputs), expected)


@MODELS
def test_autocast(blocks, make):
    model, inputs = make()
    fast = accelerated(blocks, model)
    with torch.autocast(DEVICE, torch.bfloat16):
        eager, ours = run(model, inputs), run(fast, inputs)
    assert ours.dtype == eager.dtype and torch.equal(ours, eager)


# --- other modules inside ---------------------------------------------------------------------------------------------


class Int8Linear(nn.Linear):
    """A linear with a quantized weight, as libraries put in place of a model's own."""

    def __init__(self, linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def quantize(model):
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, Int8Linear(module))
    return model


@MODELS
@pytest.mark.parametrize("when", ["before", "after"])
def test_quantized_linears(blocks, make, when):
    model, inputs = make()
    eager = quantize(copy.deepcopy(model))
    fast = accelerated(blocks, eager) if when == "before" else quantize(accelerated(blocks, model))
    assert difference(run(fast, inputs), run(eager, inputs)) < ROUNDING


def hooked(model):
    """Return a module of a class that has a replacement."""
    return (
        model.transformer_blocks[0] if hasattr(model, "transformer_blocks") else model.model.layers[0].input_layernorm
    )


@MODELS
def test_module_with_hooks_is_left(blocks, make):
    model, _ = make()
    hooked(model).register_forward_hook(lambda *args: None)
    report = blocks.accelerate(model)
    assert left(report) == {(type(hooked(model)).__name__, "it has hooks"): 1}
    assert blocks.replacements.replacement_in(hooked(model)) is None


@MODELS
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_added_afterwards_run(blocks, make, register):
    model, inputs = make()
    fast = accelerated(blocks, model)
    expected = run(fast, inputs)
    calls = []
    for module in fast.modules():
        getattr(module, register)(lambda module, *args: calls.append(module))
    assert difference(run(fast, inputs), expected) < ROUNDING
    eager = []
    for module in model.modules():
        getattr(module, register)(lambda module, *args: eager.append(module))
    run(model, inputs)
    assert [type(module).__name__ for module in calls] == [type(module).__name__ for module in eager]


@MODELS
def test_backward_hooks_added_afterwards_run(blocks, make):
    model, inputs = make()
    fast = accelerated(blocks, model).train()
    calls = []
    hooked(fast).register_full_backward_hook(lambda *args: calls.append(1))
    train(fast, inputs)
    assert calls == [1]


@MODELS
def test_state_dict(blocks, make):
    model, inputs = make()
    fast = accelerated(blocks, model)
    assert fast.state_dict().keys() == model.state_dict().keys()
    changed = {name: value * 1.5 for name, value in model.state_dict().items()}
    fast.load_state_dict(changed)
    model.load_state_dict(changed)
    assert difference(run(fast, inputs), run(model, inputs)) < ROUNDING


# --- offloading and threads -------------------------------------------------------------------------------------------


def sequential(model):
    accelerate.cpu_offload(model, execution_device=torch.device(DEVICE), offload_buffers=True)


def whole(model):
    accelerate.cpu_offload_with_hook(model, execution_device=DEVICE)


def groups(model):
    model.enable_group_offload(onload_device=torch.device(DEVICE), offload_type="leaf_level")


def casting(model):
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "make, offload",
    [(ltx, sequential), (qwen3, sequential), (ltx, whole), (qwen3, whole), (ltx, groups), (ltx, casting)],
)
def test_offloading(blocks, make, offload, when):
    model, inputs = make()
    fast = accelerated(blocks, model) if when == "after" else copy.deepcopy(model)
    offload(fast)
    offload(model)
    if when == "before":
        assert blocks.accelerate(fast).replaced
    with torch.no_grad():
        expected = run(model, inputs)
        assert difference(run(fast, inputs), expected) < ROUNDING
        blocks.restore(fast)
        assert torch.equal(run(fast, inputs), expected)


def test_sequential_offloading_keeps_the_blocks_fast(blocks):
    """Hooks of accelerate call the forward that they found: it must be the faster one."""
    model, inputs = ltx()
    sequential(model)
    with torch.no_grad():
        eager = run(model, inputs)
        report = blocks.accelerate(model)
        fast = run(model, inputs)
    assert not left(report)
    assert not torch.equal(fast, eager)  # but for rounding, which the test above checks


def test_threads(blocks):
    fast = accelerated(blocks, ltx()[0])
    many = [ltx(batch=batch)[1] for batch in (1, 2, 3, 4)] * 3

    def compute(inputs):
        with torch.no_grad():
            return run(fast, inputs)

    expected = [compute(inputs) for inputs in many]
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(*pair) for pair in zip(pool.map(compute, many), expected))


# --- parallelism ------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


def sharded(model, mesh):
    for layer in model.transformer_blocks if hasattr(model, "transformer_blocks") else model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def local(gradients):
    return {name: gradient.to_local() for name, gradient in gradients.items()}


@MODELS
def test_fully_sharded(blocks, mesh, make):
    model, inputs = make()
    expected, eager_gradients = run(model, inputs), train(model.train(), inputs)
    fast = sharded(accelerated(blocks, model.eval()), mesh)
    names = [type(module).__name__ for module in fast.modules()]
    report = blocks.accelerate(fast)
    assert report.replaced and not left(report)
    assert difference(run(fast, inputs), expected) < ROUNDING
    assert_equal_gradients(local(train(fast.train(), inputs)), eager_gradients)
    blocks.restore(fast)
    assert [type(module).__name__ for module in fast.modules()] == names
    assert not any(blocks.replacements.replacement_in(module) for module in fast.modules())
    assert torch.equal(run(fast.eval(), inputs), expected)


@MODELS
def test_accelerated_after_sharding(blocks, mesh, make):
    """The classes and hooks of FSDP are not touched, and the report says so."""
    model, inputs = make()
    expected = run(model, inputs)
    fast = sharded(model, mesh)
    report = blocks.accelerate(fast)
    assert difference(run(fast, inputs), expected) < ROUNDING
    names = {type(layer).__name__ for layer in fast.modules() if type(layer).__name__.startswith("FSDP")}
    assert {name for name, reason in left(report) if reason == "it has hooks"} <= names


@MODELS
def test_tensor_parallel(blocks, mesh, make):
    model, inputs = make()
    expected = run(model, inputs)
    if make is ltx:
        plan = {"ff.net.0.proj": ColwiseParallel(), "ff.net.2": RowwiseParallel()}
    else:
        plan = {name: ColwiseParallel() for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.gate_proj": ColwiseParallel()}
        plan |= {"mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for when in ("before", "after"):
        fast = copy.deepcopy(model)
        if when == "before":
            blocks.accelerate(fast)
        for layer in fast.transformer_blocks if make is ltx else fast.model.layers:
            parallelize_module(layer, mesh, plan)
        if when == "after":
            assert blocks.accelerate(fast).replaced
        assert difference(run(fast, inputs), expected) < ROUNDING
