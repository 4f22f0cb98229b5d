"""Test which calls replay a CUDA graph, and that none replays a graph of another state, without a GPU."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from graph_models import accelerate_on_cpu, decode, llama, ltx, ltx_inputs, module_of
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import DynamicCache, StaticCache

FIRST = "the first call of its shape"


@pytest.fixture(autouse=True)
def no_grad():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def warm(model, counts, inputs):
    """Call a model until a graph is held."""
    for _ in range(3):
        model(**inputs)
    assert counts.held == 1, counts


def test_model_on_the_cpu(blocks):
    model, inputs = ltx(), ltx_inputs()
    expected = model(**inputs).sample
    report = blocks.accelerate(model, graphs=True)
    assert "none can be captured now: the model is not on a CUDA device" in str(report)
    torch.testing.assert_close(model(**inputs).sample, expected)
    assert "1 x eager: the model is not on a CUDA device" in str(report)
    blocks.restore(model)
    assert type(model) is type(ltx())


def test_second_call_of_a_shape_is_captured(blocks):
    model = ltx()
    counts = accelerate_on_cpu(blocks, model)
    for number in range(4):
        inputs = ltx_inputs()
        output = model(**inputs)
        expected = eager(model, inputs)
        assert type(output) is type(expected)
        assert torch.equal(output.sample, expected.sample)
        assert (counts.captured, counts.replays) == (int(number > 0), max(number - 1, 0))
    assert counts.eager == {FIRST: 1}


def eager(model, inputs):
    return copy.deepcopy(model)(**inputs)  # copies have no graphs


COMPARED = "to compare its time with that of its graph"


@pytest.mark.parametrize(
    ("times", "replays", "reasons"),
    [
        ((19.0, 1.0), 6, {FIRST: 1}),
        ((30.0, 28.0), 5, {FIRST: 1, COMPARED: 1}),
        ((30.0, 25.0), 1, {FIRST: 1, COMPARED: 1, "its graph is slower: 30 ms, and 25 ms without": 4}),
    ],
    ids=["short", "as fast", "slower"],
)
def test_graph_that_is_slower_than_eager_calls_is_dropped(blocks, times, replays, reasons):
    model, inputs = ltx(), ltx_inputs()
    counts = accelerate_on_cpu(blocks, model, times=times)
    expected = eager(model, inputs).sample
    for _ in range(8):
        assert torch.equal(model(**inputs).sample, expected)
    assert (counts.captured, counts.replays, counts.eager) == (1, replays, reasons)
    assert counts.held == int("slower" not in str(counts))


def test_outputs_and_inputs_are_the_callers(blocks):
    model, inputs = ltx(), ltx_inputs()
    counts = accelerate_on_cpu(blocks, model)
    outputs = [model(**inputs, return_dict=False) for _ in range(4)]
    expected = outputs[0][0].clone()
    for output in outputs:
        assert type(output) is tuple
        assert torch.equal(output[0], expected)
        output[0].zero_()
    inputs["hidden_states"].zero_()
    assert not torch.equal(model(**inputs).sample, expected)
    assert counts.replays == 2


def test_least_recently_used_shape_goes(blocks):
    model = ltx()
    counts = accelerate_on_cpu(blocks, model, limit=2)
    for frames in (1, 2, 3):
        for _ in range(2):
            model(**ltx_inputs(frames))
        model(**ltx_inputs(1))
    assert (counts.captured, counts.held) == (3, 2)
    replays = counts.replays
    model(**ltx_inputs(2))
    assert counts.replays == replays, "this shape is the one that went"
    model(**ltx_inputs(1))
    model(**ltx_inputs(3))
    assert counts.replays == replays + 2


def test_what_makes_another_graph(blocks):
    calls = module_of(blocks, "calls")
    x = torch.randn(4, 4)

    def key(*args, modes=(), **kwargs):
        return calls.take_apart(args, kwargs, torch.device("cpu"), modes).key

    assert key(x, 1, [x, {"a": None}], flag=True) == key(x + 1, 1, [x, {"a": None}], flag=True)
    others = [
        key(x, 1),
        key(x, True),
        key(x, 1.0),
        key(x, 0.0),
        key(x, -0.0),
        key(x, x),
        key(x, [x]),
        key(x, (x,)),
        key(x, a=x),
        key(x, b=x),
        key(x, {"a": x}),
        key(x, {"b": x}),
        key(x.t(), 1),
        key(x.half(), 1),
        key(x[:2], 1),
        key(x[:1].expand(4, 4), 1),
        key(x.clone().requires_grad_(), 1),
        key(x, torch.float16),
        key(x, "1"),
        key(x, 1, modes=(True,)),
    ]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (object(), "argument x is a object, which two calls cannot be compared by"),
        ({1, 2}, "argument x is a set, which"),
        (torch.Generator(), "argument x is a Generator, which"),
        (DynamicCache(), "argument x is a DynamicCache, whose tensors move"),
        (torch.empty(2, device="meta"), "argument x is on meta, the model on cpu"),
        (torch.eye(2).to_sparse(), "argument x is a sparse tensor"),
        ([{"a": object()}], r"argument x\[0\]\['a'\] is a object"),
    ],
)
def test_refused_arguments(blocks, argument, reason):
    calls = module_of(blocks, "calls")
    with pytest.raises(calls.Refused, match=reason):
        calls.take_apart((), {"x": argument}, torch.device("cpu"), ())


def test_global_settings_are_part_of_the_key(blocks):
    gpu = module_of(blocks, "gpu").Gpu()
    before = gpu.modes()
    with torch.enable_grad():
        assert gpu.modes() != before
    with torch.inference_mode():
        assert gpu.modes() != before
    with torch.backends.cudnn.flags(deterministic=True):
        assert gpu.modes() != before
    assert gpu.modes() == before
    torch.backends.cuda.matmul.allow_tf32 ^= True
    assert gpu.modes() != before
    torch.backends.cuda.matmul.allow_tf32 ^= True


# --- changes of the model ---------------------------------------------------------------------------------------------


def lora_layer(model):
    return next(module for module in model.modules() if isinstance(module, LoraLayer))


def replace_parameter(model):
    model.proj_out.weight = nn.Parameter(model.proj_out.weight * 2, requires_grad=False)


def replace_data(model):
    model.proj_out.weight.data = model.proj_out.weight.data * 2


def replace_scalar(model):
    model.transformer_blocks[0].factor = torch.ones(())


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def change_class(model):
    model.proj_out.__class__ = Doubled


CHANGES = {
    "adapter's scale": lambda model: lora_layer(model).scaling.update(default=3.0),
    "adapter's scale by set_adapters": lambda model: model.set_adapters("default", 0.5),
    "adapters off": lambda model: model.disable_lora(),
    "adapter loaded": lambda model: model.add_adapter(LoraConfig(target_modules=["to_k"]), "second"),
    "adapter deleted": lambda model: model.delete_adapters("default"),
    "adapters unloaded": lambda model: model.unload_lora(),
    "adapter merged": lambda model: lora_layer(model).merge(),
    "dtype": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "parameter": replace_parameter,
    "data of a parameter": replace_data,
    "buffer": lambda model: model.proj_out.register_buffer("extra", torch.ones(2)),
    "attribute that is a tensor": replace_scalar,
    "training": lambda model: model.transformer_blocks[0].train(),
    "number": lambda model: setattr(model.transformer_blocks[0].norm1, "eps", 1e-2),
    "list": lambda model: model.transformer_blocks[0].listed.append(1),
    "nested": lambda model: model.transformer_blocks[0].listed[0]["deep"].add(4),
    "configuration": lambda model: model.register_to_config(in_channels=9),
    "attention processor": lambda model: model.set_attn_processor(LTXVideoAttnProcessor()),
    "attention backend": lambda model: model.set_attention_backend("native"),
    "object": lambda model: setattr(model.transformer_blocks[0].attn1.processor, "strength", 2),
    "module": lambda model: setattr(model, "proj_out", nn.Linear(32, 8)),
    "more modules": lambda model: model.transformer_blocks.append(copy.deepcopy(model.transformer_blocks[0])),
    "class": change_class,
    "hook": lambda model: model.proj_out.register_forward_hook(lambda module, args, output: output * 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_graph_outlives_a_change(blocks, change):
    model, inputs = ltx(), ltx_inputs()
    model.add_adapter(LoraConfig(target_modules=["to_q", "proj_out"], init_lora_weights=False))
    model.transformer_blocks[0].factor = torch.ones(())
    model.transformer_blocks[0].listed = [{"deep": {1, 2}}]
    model.requires_grad_(False)
    if change in (replace_parameter, replace_data, change_class, CHANGES["buffer"]):
        model.unload_lora()
    counts = accelerate_on_cpu(blocks, model)
    warm(model, counts, inputs)
    change(model)
    model.requires_grad_(False)
    replays = counts.replays
    model(**inputs)
    assert counts.replays == replays
    (reason,) = counts.eager.keys() - {FIRST}
    assert reason.startswith("the model has changed: ") or reason == "proj_out has hooks"


def test_forward_of_a_class(blocks, monkeypatch):
    model, inputs = ltx(), ltx_inputs()
    counts = accelerate_on_cpu(blocks, model)
    warm(model, counts, inputs)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: nn.functional.linear(x, self.weight))
    model(**inputs)
    assert counts.eager["the model has changed: the forward of Linear"] == 1


def test_changes_that_graphs_see(blocks):
    model, inputs = ltx(), ltx_inputs()
    counts = accelerate_on_cpu(blocks, model)
    warm(model, counts, inputs)
    model.load_state_dict({name: weight + 1 for name, weight in model.state_dict().items()})
    model.proj_out.weight.mul_(2)
    model.train(False)
    model.proj_out.register_forward_hook(lambda module, args, output: None).remove()
    model.transformer_blocks[0].norm1.eps = float(repr(model.transformer_blocks[0].norm1.eps))
    replays = counts.replays
    assert torch.equal(model(**inputs).sample, eager(model, inputs).sample)
    assert counts.replays == replays + 1


def test_capture_begins_anew_after_a_change(blocks):
    model, inputs = ltx(), ltx_inputs()
    counts = accelerate_on_cpu(blocks, model)
    warm(model, counts, inputs)
    model.transformer_blocks[0].norm1.eps = 1e-2
    model(**inputs)
    assert counts.held == 0
    warm(model, counts, inputs)
    assert (counts.captured, counts.held) == (2, 1)
    assert counts.eager["the model has changed: transformer_blocks.0.norm1.eps"] == 1


class Holder:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(()), torch.ones(3).numpy(), [torch.ones(3)]])
def test_object_that_holds_one_tensor(blocks, value):
    module = Wrapped(nn.Identity())
    module.layer.holder = Holder(value)
    snapshot = module_of(blocks, "snapshots").Snapshot(module, torch.device("cpu"))
    assert snapshot.is_current(module)
    module.layer.holder.value = copy.deepcopy(value)
    assert not snapshot.is_current(module)
    assert "layer.holder" in snapshot.find_difference(module)


class Weights(nn.Module):
    """Parameters and buffers with one element, with none, and with several."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.ones(()), requires_grad=False)
        self.several = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_parameter("none", None)
        self.register_buffer("one", torch.ones(1))
        self.register_buffer("no", None)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "scalar", nn.Parameter(torch.ones(()), requires_grad=False)),
        lambda layer: setattr(layer, "one", torch.ones(1)),
        lambda layer: setattr(layer, "several", nn.Parameter(torch.ones(3), requires_grad=False)),
        lambda layer: setattr(layer, "none", nn.Parameter(torch.ones(()), requires_grad=False)),
        lambda layer: setattr(layer, "no", torch.ones(1)),
        lambda layer: setattr(layer, "several", None),
        lambda layer: delattr(layer, "no"),
        lambda layer: setattr(layer.scalar, "data", torch.ones(())),
        lambda layer: setattr(layer.several, "data", torch.ones(3)),
        lambda layer: layer._buffers.update(another=None),
        lambda layer: layer._parameters.update(renamed=layer._parameters.pop("several")),
        lambda layer: setattr(layer, "_parameters", {}),
        lambda layer: setattr(layer, "_forward_hooks", {1: print}),
        lambda layer: layer.several.set_(torch.ones(3)),
    ],
)
def test_weights_that_were_replaced_by_equal_ones(blocks, change):
    module = Wrapped(Weights())
    snapshot = module_of(blocks, "snapshots").Snapshot(module, torch.device("cpu"))
    module.layer.several.mul_(2).div_(2)
    assert snapshot.is_current(module)
    change(module.layer)
    assert not snapshot.is_current(module)


def test_cached_tensors_on_the_host_are_compared_by_version(blocks):
    snapshots = module_of(blocks, "snapshots")
    module = nn.Identity()
    module.table = torch.ones(3)
    snapshot = snapshots.Snapshot(module, torch.device("cuda", 0))
    assert snapshot.is_current(module)
    module.table.add_(1)
    assert not snapshot.is_current(module)
    assert snapshot.find_difference(module) == "the tensor table"


def test_memory_of_a_tensor_inside_an_object(blocks):
    module = Wrapped(nn.Identity())
    module.layer.holder = Holder([torch.ones(3)])
    snapshot = module_of(blocks, "snapshots").Snapshot(module, torch.device("cpu"))
    module.layer.holder.value[0].mul_(2)
    assert snapshot.is_current(module), "graphs read what is in the memory"
    module.layer.holder.value[0].data = torch.ones(3)
    assert not snapshot.is_current(module)
    assert snapshot.find_difference(module) == "the tensor layer.holder.value.0"


# --- what cannot be captured ------------------------------------------------------------------------------------------


def test_hooks_inside(blocks):
    model, inputs = ltx(), ltx_inputs()
    counts = accelerate_on_cpu(blocks, model)
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
    assert snapshot.is_current(model), "nothing else matters"
    model.transformer_blocks[1].attn1 = copy.deepcopy(model.transformer_blocks[0].attn1)
    assert not snapshot.is_current(model)
    model.transformer_blocks[1].attn1 = hooked
    assert snapshot.is_current(model)
    handle.remove()
    assert not snapshot.is_current(model)
    assert snapshot.find_difference(model) == "'transformer_blocks.1.attn1 has hooks' is no longer true"
    model.transformer_blocks[1].attn1.forward = lambda *args, **kwargs: None
    assert snapshots.Snapshot(model, torch.device("cpu")).obstacle == (
        "the forward of transformer_blocks.1.attn1 was replaced by other code"
    )
    on_another = snapshots.Snapshot(Wrapped(nn.Linear(3, 3)), torch.device("meta"))
    assert on_another.obstacle == "layer.weight is on cpu, other parameters on meta"
    assert on_another.is_current(Wrapped(nn.Linear(3, 3)))
    assert not on_another.is_current(Wrapped(nn.Linear(3, 3, device="meta")))
    assert not on_another.is_current(nn.Linear(3, 3))


def test_hooks_of_the_model_itself_run_around_a_replay(blocks):
    model, inputs = ltx(), ltx_inputs()
    counts = accelerate_on_cpu(blocks, model)
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    warm(model, counts, inputs)
    model(**inputs)
    assert len(seen) == 4
    assert counts.replays == 2


def test_gradients(blocks):
    model, inputs = ltx(), ltx_inputs()
    counts = accelerate_on_cpu(blocks, model)
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

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Writing(nn.Linear):
    def forward(self, x):
        result = super().forward(x)
        x.add_(1)
        return result


class Thing:
    pass


class Strange(nn.Linear):
    def forward(self, x):
        return super().forward(x), Thing()


class Wrapped(nn.Module):
    """A model with one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def test_forward_that_counts(blocks):
    model, x = Wrapped(Counting()), torch.randn(2, 3)
    counts = accelerate_on_cpu(blocks, model)
    first = model(x)
    torch.testing.assert_close(model(x), 2 * first)
    torch.testing.assert_close(model(x), 3 * first)
    assert counts.eager == {"its forward changes layer.calls": 3}


def test_forward_that_writes_into_its_argument(blocks):
    model, x = Wrapped(Writing(3, 3)), torch.zeros(2, 3)
    counts = accelerate_on_cpu(blocks, model)
    for _ in range(4):
        model(x)
    assert torch.equal(x, torch.full((2, 3), 4.0))
    assert counts.eager["its forward writes into its arguments"] == 2
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


def test_expanded_and_overlapping_arguments(blocks):
    model = Wrapped(nn.Linear(3, 3))
    counts = accelerate_on_cpu(blocks, model)
    for _ in range(3):
        x = torch.randn(1, 3).expand(5, 3)
        assert torch.equal(model(x), eager(model, {"x": x}))
    assert counts.replays == 1
    for _ in range(2):
        model(torch.randn(7).unfold(0, 3, 2))
    assert counts.eager["elements of an argument share memory"] == 1


# --- caches -----------------------------------------------------------------------------------------------------------


def test_decoding_with_a_static_cache(blocks):
    model = llama()
    expected = decode(model, StaticCache(model.config, max_cache_len=32), 8)
    counts = accelerate_on_cpu(blocks, model)
    for _ in range(2):
        cache = StaticCache(model.config, max_cache_len=32)
        assert torch.equal(decode(model, cache, 8), expected)
        assert cache.get_seq_length() == 12
    assert counts.captured == 2, "one for each cache"
    assert counts.replays == 2 * 5
    cache.reset()
    assert torch.equal(decode(model, cache, 8), expected)
    assert counts.replays == 2 * 5 + 7


def test_generate(blocks):
    model, prompt = llama(), torch.arange(5)[None]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    expected = model.generate(prompt, **options, disable_compile=True)
    counts = accelerate_on_cpu(blocks, model)
    assert torch.equal(model.generate(prompt, **options, disable_compile=True), expected)
    assert counts.replays == 5


def test_output_has_the_cache_of_the_call(blocks):
    model = llama()
    cache = StaticCache(model.config, max_cache_len=32)
    accelerate_on_cpu(blocks, model)
    for _ in range(4):
        output = model(input_ids=torch.tensor([[1]]), past_key_values=cache, use_cache=True)
        assert output.past_key_values is cache


def test_state_of_a_cache_does_not_keep_it_alive(blocks):
    cache = StaticCache(llama().config, max_cache_len=32)
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    state = module_of(blocks, "graph_runner")._Caches({"cache": cache}, torch.device("cpu"))
    assert state.find_difference({"cache": cache}) is None
    keys = weakref.ref(cache.layers[0].keys)
    del cache
    gc.collect()
    assert keys() is None
    assert not state.are_alive()


def test_caches_that_count_in_python_are_not_captured(blocks):
    model = llama()
    model.config.sliding_window, model.config.layer_types = 8, ["sliding_attention"] * 2
    expected = decode(model, StaticCache(model.config, max_cache_len=32), 12)
    counts = accelerate_on_cpu(blocks, model)
    assert torch.equal(decode(model, StaticCache(model.config, max_cache_len=32), 12), expected)
    assert counts.captured == 0
    assert any("cumulative_length_int" in reason for reason in counts.eager), counts


def test_growing_caches(blocks):
    model, tokens = llama(), torch.arange(5)[None]
    counts = accelerate_on_cpu(blocks, model)
    for _ in range(3):
        model(input_ids=tokens, past_key_values=DynamicCache(config=model.config), use_cache=True)
    for _ in range(3):
        model(input_ids=tokens, use_cache=True)
    for _ in range(3):
        model(input_ids=tokens, use_cache=False)
    assert counts.eager["its output holds a DynamicCache, which a graph cannot make"] == 2
    assert sum(number for reason, number in counts.eager.items() if "tensors move" in reason) == 3
    assert counts.replays == 1


# --- around it --------------------------------------------------------------------------------------------------------


def test_threads(blocks):
    model = ltx()
    counts = accelerate_on_cpu(blocks, model)
    inputs = [ltx_inputs(frames) for frames in (1, 2, 1, 2)]
    expected = [eager(model, each).sample for each in inputs]
    failures = []

    def work(number):
        with torch.no_grad():
            for _ in range(5):
                if not torch.equal(model(**inputs[number]).sample, expected[number]):
                    failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    # For each of two shapes a capture, and before it a call of each of its two threads at most.
    assert counts.captured == 2
    assert counts.replays >= 4 * 5 - 2 * 3


def test_a_thread_runs_the_model_before_it_captures(blocks):
    model, inputs = ltx(), ltx_inputs()
    counts = accelerate_on_cpu(blocks, model)

    def call(times):
        with torch.no_grad():
            for _ in range(times):
                model(**inputs)

    for calls, captured, replays in ((1, 0, 0), (1, 0, 0), (2, 1, 0), (1, 1, 1)):
        thread = threading.Thread(target=call, args=(calls,))
        thread.start()
        thread.join()
        assert (counts.captured, counts.replays) == (captured, replays)
    assert counts.eager == {"the first call of its shape": 1, "the first call in its thread": 2}


def test_copies_and_pickles(blocks):
    model, inputs = ltx(), ltx_inputs()
    counts = accelerate_on_cpu(blocks, model)
    warm(model, counts, inputs)
    expected = model(**inputs).sample
    own = type(ltx())
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert type(loaded) is own
    torch.testing.assert_close(loaded(**inputs).sample, expected)
    replays = counts.replays
    assert torch.equal(copied(**inputs).sample, expected)
    assert counts.replays == replays
    blocks.restore(copied)
    blocks.restore(model)
    assert type(copied) is type(model) is own
    torch.testing.assert_close(model(**inputs).sample, expected)
    assert counts.held == 0


def test_model_is_not_kept_alive(blocks):
    model, inputs = ltx(), ltx_inputs()
    accelerate_on_cpu(blocks, model)
    with model.cache_context("cond"):
        model(**inputs)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_pipeline(blocks):
    pipeline = LTXPipeline(FlowMatchEulerDiscreteScheduler(), None, llama(), None, ltx())
    report = blocks.accelerate(pipeline, graphs=True)
    assert list(report.graphs) == ["transformer"]
    blocks.restore(pipeline)
    assert type(pipeline.transformer) is type(ltx())


def test_compile_on_top(blocks):
    model, x = Wrapped(nn.Linear(3, 3)), torch.randn(2, 3)
    counts = accelerate_on_cpu(blocks, model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(x), model.layer(x))
    assert counts.captured == counts.replays == 0
