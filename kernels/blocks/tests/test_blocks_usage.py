"""Accelerated models in use: adapters, compiling, patches, offloading, threads, parallelism."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import processes
import pytest
import small_models
import torch
import torch.distributed as dist
from accelerate import dispatch_model
from diffusers import FirstBlockCacheConfig, MagCacheConfig
from example_models import OFFLOADS, ROUNDING, accelerated, ltx, own, qwen3, run
from model_cases import DEVICE, built, error
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")
WHEN = pytest.mark.parametrize("when", ["before", "after"])


# --- training ---------------------------------------------------------------------------------------------------------


def train(model, inputs):
    model.zero_grad()
    run(model, inputs).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(ours, eager):
    assert ours.keys() == eager.keys() and eager
    scale = max(gradient.norm().item() for gradient in eager.values())
    for name, gradient in eager.items():
        # Some gradients are zero but for rounding, that of the bias of a key projection for example.
        assert (ours[name] - gradient).norm() <= ROUNDING * (gradient.norm() + 0.1 * scale), name


def with_adapter(model, make):
    torch.manual_seed(1)
    targets = ["to_q", "to_out.0", "net.2"] if make is ltx else ["q_proj", "down_proj"]
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    if make is qwen3:
        return get_peft_model(model, config)
    model.add_adapter(config)
    return model


@pytest.mark.parametrize("make, when", [(qwen3, "before"), (ltx, "after")])
def test_adapters(blocks, make, when):
    model, inputs = make(layers=1)
    plain, eager = run(model, inputs), with_adapter(copy.deepcopy(model), make)
    fast = accelerated(blocks, eager if when == "before" else model)
    if when == "after":
        run(fast, inputs)
        fast = with_adapter(fast, make)
    assert error(run(fast, inputs), run(eager, inputs)) < ROUNDING
    assert error(run(fast, inputs), plain) > 100 * ROUNDING
    ours = train(fast, inputs)
    assert all("lora" in name for name in ours)
    assert_equal_gradients(ours, train(eager, inputs))


# --- compiling --------------------------------------------------------------------------------------------------------


def compiled_graph(model, inputs):
    """Return the graph that `torch.compile` traces."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module.graph)
        return module.forward

    torch.compile(model, backend=backend)(**inputs)
    return graphs[0]


def exported_graph(model, inputs):
    return torch.export.export(model, (), inputs).graph


@pytest.mark.parametrize("trace", [compiled_graph, exported_graph])
def test_traces_have_the_models_own_operations(blocks, trace):
    model, inputs = own()
    fast = accelerated(blocks, model)
    run(fast, inputs)
    expected, ours = (
        [str(node.target) for node in trace(each, inputs).nodes if node.op.startswith("call")] for each in (model, fast)
    )
    assert ours == expected and any("rms_norm" in operation for operation in ours)


@pytest.mark.parametrize("graphs", [False, True])
def test_compiled_classes_share_neither_limits_nor_sizes(blocks, graphs):
    """Torch traces one code object 8 times, and sizes that differ between its calls as symbols."""
    for batch in range(1, 10):
        model, inputs = own(batch=batch)
        model.__class__ = type("Layers", (type(model),), {})
        blocks.accelerate(model, graphs=graphs)
        placeholders = compiled_graph(model, inputs).find_nodes(op="placeholder")
        assert all(torch.is_tensor(node.meta["example_value"]) for node in placeholders)


@torch.no_grad()
def test_accelerated_after_compiling(blocks):
    model, inputs = own()
    expected = run(model, inputs)
    compiled = torch.compile(model, backend="eager")
    run(compiled, inputs)
    blocks.accelerate(compiled)
    assert error(run(compiled, inputs), expected) < ROUNDING
    blocks.restore(compiled)
    assert torch.equal(run(compiled, inputs), expected)


# --- changed modules --------------------------------------------------------------------------------------------------


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


class Doubled(nn.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def exchange(model, wrap=None):
    model.layers[0].norm = Doubled(32, eps=1e-6).to(DEVICE) if wrap is None else wrap(nn.LayerNorm(32, device=DEVICE))


WRAPS = [
    functools.partial(torch.compile, backend="eager"),
    torch.jit.script,
    lambda norm: torch.jit.trace(norm, torch.ones(1, 32, device=DEVICE)),
    lambda norm: prune.l1_unstructured(norm, "weight", 0.5),
]
EXCHANGES = [functools.partial(exchange, wrap=wrap) for wrap in WRAPS]


def patch_instance(model):
    norm = model.layers[0].norm
    norm.forward = lambda x: 2 * nn.RMSNorm.forward(norm, x)


def load(model):
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def write(model):
    """Rotary tables have two values for a pair from then on."""
    model.layers[0].cos.copy_(torch.linspace(0, 1, 96).view(6, 16))


@WHEN
@pytest.mark.parametrize("change", [quantize, exchange, patch_instance, load, write, *EXCHANGES])
@torch.no_grad()
def test_changed_modules(blocks, change, when):
    model, inputs = own()
    fast = copy.deepcopy(model)
    if when == "after":
        blocks.accelerate(fast)
        assert error(run(fast, inputs), run(model, inputs)) < ROUNDING
    before = run(model, inputs)
    change(model)
    change(fast)
    blocks.accelerate(fast)
    assert fast.state_dict().keys() == model.state_dict().keys()
    assert error(run(fast, inputs), run(model, inputs)) < ROUNDING
    assert error(run(fast, inputs), before) > 1e-3


@WHEN
def test_hooks_run_in_order(blocks, when):
    model, inputs = own()
    fast, calls = copy.deepcopy(model), {}
    if when == "after":
        blocks.accelerate(fast)
        run(fast, inputs)
    for each in (model, fast):
        calls[each] = []
        for name, module in each.named_modules():
            for register in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
                hook = functools.partial(lambda entry, to, *args: to.append(entry), (name, register), calls[each])
                getattr(module, f"register_{register}")(hook)
    if when == "before":
        blocks.accelerate(fast)
    assert_equal_gradients(train(fast, inputs), train(model, inputs))
    assert calls[fast] == calls[model] and len(calls[model]) == 21


@torch.no_grad()
def test_hooks_for_all_modules(blocks):
    model, inputs = own()
    fast = accelerated(blocks, model)
    run(fast, inputs)
    with register_module_forward_hook(lambda module, _, output: 2 * output if type(module) is nn.Linear else None):
        assert error(run(fast, inputs), run(model, inputs)) < ROUNDING


def patched_processor(self, attn, hidden_states, encoder_hidden_states=None, *args, **kwargs):
    return hidden_states if encoder_hidden_states is None else (hidden_states, encoder_hidden_states)


def flux():
    case = built(small_models.CASES["Flux.1"])
    return case.model, case.inputs


PATCHES = {
    "method of a class": (
        qwen3,
        "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm.forward",
        lambda self, x: 1.5 * x,
    ),
    "method of a block": (own, "example_models.Layer.act", lambda self, gate, up: up),
    "function": (qwen3, "transformers.models.qwen3.modeling_qwen3.apply_rotary_pos_emb", lambda q, k, *_: (-q, k)),
    "function of a norm": (own, "torch.nn.functional.layer_norm", lambda x, *_: 3 * x),
    "function of Torch": (qwen3, "torch.nn.functional.silu", lambda x, inplace=False: 3 * x),
    "processor": (flux, "diffusers.models.transformers.transformer_flux.FluxAttnProcessor.__call__", patched_processor),
}


@pytest.mark.parametrize("name, when", [*((name, "after") for name in PATCHES), ("method of a class", "before")])
@torch.no_grad()
def test_patches_are_called(blocks, monkeypatch, name, when):
    make, target, patch = PATCHES[name]
    model, inputs = make()
    unpatched = run(model, inputs)
    if when == "after":
        report = blocks.accelerate(model)
        run(model, inputs)
    monkeypatch.setattr(target, patch)
    if when == "before":
        report = blocks.accelerate(model)
    actual = run(model, inputs)
    left = report.left[type(model).__name__, "the method of a class was patched after accelerate"]
    assert left == (when == "after" and "function" not in name)
    monkeypatch.undo()
    assert error(run(model, inputs), unpatched) < ROUNDING
    monkeypatch.setattr(target, patch)
    blocks.restore(model)
    expected = run(model, inputs)
    assert error(actual, expected) < ROUNDING and error(unpatched, expected) > 1e-3


# --- caches, offloading and threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, config, when",
    [
        ("Flux.1", FirstBlockCacheConfig(threshold=0.0), "after"),
        ("Qwen-Image", MagCacheConfig(calibrate=True, num_inference_steps=4), "before"),
    ],
)
@torch.no_grad()
def test_caches_of_diffusers(blocks, name, config, when):
    case = built(small_models.CASES[name])
    expected = case.run()
    if when == "after":
        blocks.accelerate(case.model)
        case.run()
    case.model.enable_cache(config)
    if when == "before":
        blocks.accelerate(case.model)
    with case.model.cache_context("test"):
        assert error(case.run(), expected) < ROUNDING


def casting(model):
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


@pytest.mark.parametrize("offload, when", [*zip(OFFLOADS, ("after", "before", "before")), (casting, "after")])
@torch.no_grad()
def test_offloading(blocks, offload, when):
    model, inputs = ltx(layers=1)
    fast = copy.deepcopy(model)
    if when == "after":
        blocks.accelerate(fast)
        run(fast, inputs)
    offload(fast)
    offload(model)
    report = blocks.accelerate(fast)
    expected = run(model, inputs)
    assert error(run(fast, inputs), expected) < ROUNDING and report.replaced
    blocks.restore(fast)
    assert torch.equal(run(fast, inputs), expected)


@torch.no_grad()
def test_device_map(blocks, tmp_path):
    """The hooks of each part move its inputs or its weights: traces break there, and no part has a CUDA graph."""
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
    model, inputs = own()
    model.layers.append(copy.deepcopy(model.layers[0]))
    expected = run(model, inputs)
    first, second = ("cuda:0", "cuda:1") if DEVICE == "cuda" else ("cpu", "disk")
    dispatch_model(model, {"layers.0": first, "layers.1": second}, offload_dir=tmp_path)
    report = blocks.accelerate(model)
    assert error(run(model, inputs), expected) < ROUNDING and report.replaced
    assert any(kind == "graph break" for kind, _ in report.left)
    counts = blocks.accelerate(model, graphs=True).graphs["Layers"]
    assert error(run(model, inputs), expected) < ROUNDING
    assert counts.note == ("layers.0 has hooks" if DEVICE == "cuda" else "the model is not on a CUDA device")


def test_threads(blocks):
    model, _ = own()
    fast = accelerated(blocks, model)
    many = [own(batch=batch)[1] for batch in (1, 2, 3, 4)] * 3

    def compute(inputs):
        with torch.no_grad():
            return run(fast, inputs)

    with ThreadPoolExecutor(4) as pool:
        for ours, inputs in zip(pool.map(compute, many), many):
            assert error(ours, run(model, inputs)) < ROUNDING


# --- parallelism ------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


def test_data_parallel(local_kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", local_kernels)
    number = torch.cuda.device_count() or 2
    torch.multiprocessing.spawn(processes.compare, (number, tmp_path), nprocs=number)


@WHEN
def test_tensor_parallel(blocks, mesh, when):
    model, inputs = qwen3(layers=1)
    expected = run(model, inputs)
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.gate_proj": ColwiseParallel()}
    plan |= {"mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    if when == "before":
        blocks.accelerate(model)
        run(model, inputs)
    parallelize_module(model.model.layers[0], mesh, plan)
    blocks.accelerate(model)
    assert error(run(model, inputs), expected) < ROUNDING
