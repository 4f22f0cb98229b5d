"""Test which calls replay a CUDA graph, and that none replays a graph of another state, without a GPU."""

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from graph_models import (
    FIRST,
    Wrapped,
    accelerate_on_cpu,
    accelerated_ltx,
    captured_ltx,
    decode,
    eager,
    is_same,
    llama,
    ltx,
    ltx_inputs,
    module_of,
)
from text_models import OurOps
from torch import nn
from transformers import DynamicCache, StaticCache

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")


def test_model_on_the_cpu(blocks):
    model, inputs = ltx(), ltx_inputs()
    expected = model(**inputs).sample
    report = blocks.accelerate(model, graphs=True)
    assert "none can be captured now: the model is not on a CUDA device" in str(report)
    torch.testing.assert_close(model(**inputs).sample, expected)
    assert "1 x eager: the model is not on a CUDA device" in str(report) and not report.replaced
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
        assert is_same(output.sample, expected.sample)
        assert (counts.captured, counts.replays) == (int(number > 0), max(number - 1, 0))
    assert counts.eager == {FIRST: 1}


def test_outputs_and_inputs_are_the_callers(blocks):
    model, inputs, counts = accelerated_ltx(blocks)
    outputs = [model(**inputs, return_dict=False) for _ in range(4)]
    expected = outputs[0][0].clone()
    for output in outputs:
        assert type(output) is tuple
        assert is_same(output[0], expected)
        output[0].zero_()
    inputs["hidden_states"].zero_()
    assert not is_same(model(**inputs).sample, expected)
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
    arguments = [1, True, 1.0, 0.0, -0.0, x, [x], (x,), {"a": x}, {"b": x}, torch.float16, "1"]
    tensors = [x.t(), x.half(), x[:2], x[:1].expand(4, 4), x.clone().requires_grad_()]
    others = [*(key(x, other) for other in arguments), *(key(other, 1) for other in tensors)]
    others += [key(x, a=x), key(x, b=x), key(x, 1, modes=(True,))]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (object(), "argument x is a object, which two calls cannot be compared by"),
        ({1, 2}, "argument x is a set, which"),
        (torch.Generator(), "argument x is a Generator, which"),
        (DynamicCache(), "argument x is a DynamicCache, whose tensors move: use a StaticCache"),
        (torch.empty(2, device="meta"), "argument x is on meta, the model on cpu"),
        (torch.eye(2).to_sparse(), "argument x is a Tensor, which two calls cannot be compared by"),
        ([{"a": object()}], r"argument x\[0\]\['a'\] is a object"),
    ],
)
def test_refused_arguments(blocks, argument, reason):
    calls = module_of(blocks, "calls")
    with pytest.raises(calls.Refused, match=reason):
        calls.take_apart((), {"x": argument}, torch.device("cpu"), ())


def test_a_use_that_fails_is_recorded_for_the_next_stream(blocks, monkeypatch):
    recorded = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=recorded.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    with pytest.raises(torch.OutOfMemoryError), module_of(blocks, "gpu").Gpu().in_order(None):
        raise torch.OutOfMemoryError
    assert recorded == ["stream"]


def test_global_settings_are_part_of_the_key(blocks):
    gpu = module_of(blocks, "gpu").Gpu()
    before = gpu.modes()
    for mode in (torch.enable_grad(), torch.inference_mode(), torch.backends.cudnn.flags(deterministic=True)):
        with mode:
            assert gpu.modes() != before
    assert gpu.modes() == before
    torch.backends.cuda.matmul.allow_tf32 ^= True
    assert gpu.modes() != before
    torch.backends.cuda.matmul.allow_tf32 ^= True


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
    with OurOps("decode") as calls:
        output = model(input_ids=torch.tensor([[1]]), past_key_values=cache, use_cache=True)
    assert output.past_key_values is cache and counts.replays == 2 * 5 + 8
    expected_ops = {"linear": 7, "gated_linear": 2, "cached_attention": 2}
    assert calls.ops == (expected_ops if blocks.kernel_set.DEVICE == "cpu" else {}), "the model is on the CPU"


def test_state_of_a_cache_does_not_keep_it_alive(blocks):
    model, tokens = llama(), torch.tensor([[1]])
    accelerate_on_cpu(blocks, model)
    runner = module_of(blocks, "graphs").runners[model]
    cache = StaticCache(model.config, max_cache_len=32)
    model(input_ids=tokens, past_key_values=cache, use_cache=True)
    model(input_ids=tokens, past_key_values=cache, use_cache=True)
    keys = weakref.ref(cache.layers[0].keys)
    assert len(runner._shapes) == 1
    del cache
    gc.collect()
    assert keys() is None
    model(input_ids=tokens, past_key_values=StaticCache(model.config, max_cache_len=32), use_cache=True)
    assert len(runner._shapes) == 1, "no later cache is taken for it"


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
        model(input_ids=tokens, use_cache=True)
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

    @torch.no_grad()
    def work(number):
        return all(is_same(model(**inputs[number]).sample, expected[number]) for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    # For each of two shapes a capture, and before it a call of each of its two threads at most.
    assert counts.captured == 2
    assert counts.replays >= 4 * 5 - 2 * 3


def test_a_thread_runs_the_model_before_it_captures(blocks):
    model, inputs, counts = accelerated_ltx(blocks)

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
    model, inputs, counts = captured_ltx(blocks)
    expected = model(**inputs).sample
    own = type(ltx())
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert type(loaded) is own
    torch.testing.assert_close(loaded(**inputs).sample, expected)
    replays = counts.replays
    assert is_same(copied(**inputs).sample, expected)
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


class Registered(nn.LayerNorm):
    kinds = []  # noqa: RUF012

    def __init_subclass__(cls, *, kind):
        cls.kinds.append(kind)


class Norm(Registered, kind="layer"):
    pass


def test_classes_that_register_their_subclasses(blocks):
    model, x = Norm(8), torch.randn(2, 8)
    expected = model(x)
    blocks.accelerate(model, graphs=True)
    assert torch.equal(model(x), expected) and type(model) is not Norm
    blocks.restore(model)
    assert type(model) is Norm and Registered.kinds == ["layer"]


def test_compile_on_top(blocks):
    model, x = Wrapped(nn.Linear(3, 3)), torch.randn(2, 3)
    counts = accelerate_on_cpu(blocks, model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(3):
        assert is_same(compiled(x), model.layer(x))
    assert counts.captured == counts.replays == 0
