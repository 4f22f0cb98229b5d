"""Test CUDA graphs on a GPU: replays equal eager calls, and failed captures leave CUDA unchanged."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from graph_models import decode, graphed, inputs_on_gpu, is_same, llama, ltx_on_gpu, module_of, without_graphs
from text_models import lively, model_of
from torch import nn
from transformers import StaticCache

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("no_grad"),
]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def random_numbers_work():
    torch.manual_seed(1)
    first = torch.rand(1000, device="cuda")
    torch.manual_seed(1)
    return torch.equal(first, torch.rand(1000, device="cuda"))


@pytest.mark.parametrize("device", ["cuda", pytest.param("cuda:1", marks=TWO_GPUS)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replays_are_equal_to_eager(blocks, dtype, device):
    model = ltx_on_gpu(dtype, device)
    counts = graphed(blocks, model)
    for _ in range(5):
        for frames in (2, 3):
            inputs = inputs_on_gpu(frames, dtype, device)
            output = model(**inputs)
            expected = without_graphs(blocks, model, inputs)
            assert type(output) is type(expected)
            assert is_same(output.sample, expected.sample)
    assert (counts.captured, counts.held, counts.replays) == (2, 2, 6)
    assert counts.memory > 0


@pytest.mark.parametrize(
    "make", [llama, lambda: model_of("qwen3", attention="sdpa", sliding_window=64).requires_grad_(False)]
)
def test_prefill_is_equal_to_eager(blocks, make):
    model = make().to("cuda", torch.bfloat16)
    counts = graphed(blocks, model)
    for _ in range(4):
        inputs = {"input_ids": torch.randint(61, (2, 16), device="cuda"), "use_cache": False}
        assert is_same(model(**inputs).logits, without_graphs(blocks, model, inputs).logits)
    assert counts.replays == 2


def test_model_that_leaves_the_gpu_and_comes_back(blocks):
    model, inputs = ltx_on_gpu(), inputs_on_gpu()
    counts = graphed(blocks, model)
    for _ in range(3):
        before = model(**inputs).sample
    model.to("cpu").to("cuda")
    for _ in range(4):
        after = model(**inputs).sample
        assert is_same(after, without_graphs(blocks, model, inputs).sample)
    assert torch.equal(before, after)
    assert counts.captured in (1, 2)  # the weights may have their former addresses


# --- calls without a capture -----------------------------------------------------------------------------------------


class Failing(nn.Module):
    """A model that cannot be captured."""

    def __init__(self, fail):
        super().__init__()
        self.linear = nn.Linear(8, 8, device="cuda")
        self.fail = fail

    def forward(self, x):
        x = self.linear(x)
        self.fail(x)
        return self.linear(x)


FAILURES = {
    "item": lambda x: x.sum().item(),
    "copy to the host": lambda x: x.cpu(),
    "copy from the host": lambda x: x.copy_(torch.ones(8)),
    "nonzero": lambda x: x.nonzero(),
    "another stream": lambda x: torch.cuda.Stream().wait_stream(torch.cuda.default_stream()),
}


@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_error_inside_a_capture(blocks, fail):
    model = Failing(fail)
    counts = graphed(blocks, model)
    other = ltx_on_gpu()
    other_counts, inputs = graphed(blocks, other), inputs_on_gpu()
    stream = torch.cuda.current_stream()
    for _ in range(4):
        x = torch.randn(4, 8, device="cuda")
        assert is_same(model(x), without_graphs(blocks, model, {"x": x}))
    if fail is not FAILURES["another stream"]:
        assert counts.held == 0
        assert sum(number for reason, number in counts.eager.items() if "it cannot be captured" in reason) == 3
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    assert not module_of(blocks, "gpu")._broken, "Torch could not end the capture"
    # The allocator, the random number generator and later captures work.
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert random_numbers_work()
    for _ in range(4):
        assert is_same(other(**inputs).sample, without_graphs(blocks, other, inputs).sample)
    assert other_counts.replays == 2
    used = torch.cuda.memory_allocated()
    for _ in range(3):  # memory that several streams used is recycled only outside of captures
        tensor = torch.empty(2**20, device="cuda")
        tensor.record_stream(torch.cuda.Stream())
        del tensor
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= used


def test_dropout(blocks):
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda().requires_grad_(False)
    counts = graphed(blocks, model)
    x = torch.randn(64, 64, device="cuda")
    outputs = [model(x) for _ in range(5)]
    assert counts.replays == 3
    assert not any(torch.equal(a, b) for a, b in zip(outputs, outputs[1:]))
    assert random_numbers_work()


def test_autocast(blocks):
    model, inputs = ltx_on_gpu(torch.float32), inputs_on_gpu(dtype=torch.float32)
    counts = graphed(blocks, model)
    for _ in range(4):
        with torch.autocast("cuda", torch.bfloat16):
            output = model(**inputs).sample
            assert is_same(output, without_graphs(blocks, model, inputs).sample)
    assert counts.replays == 2
    model(**inputs)
    assert counts.replays == 2


# --- caches, streams, threads, memory ---------------------------------------------------------------------------------


def test_decoding_with_a_static_cache(blocks):
    model = llama().to("cuda", torch.bfloat16)
    blocks.accelerate(model)
    expected = decode(model, StaticCache(model.config, max_cache_len=64), 40, "cuda")
    counts = graphed(blocks, model)
    for _ in range(2):
        cache = StaticCache(model.config, max_cache_len=64)
        assert torch.equal(decode(model, cache, 40, "cuda"), expected)
        assert int(cache.get_seq_length()) == 44
    assert counts.replays == 2 * 37
    cache.reset()
    assert torch.equal(decode(model, cache, 40, "cuda"), expected)


PROMPT = torch.tensor([[0, 0, 41, 7, 12, 33], [5, 9, 17, 7, 12, 30]])
CALLS = [
    {},
    {"attention_mask": (PROMPT != 0).long(), "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"do_sample": True, "top_k": 0, "min_p": 0.05, "typical_p": 0.95},
    {"eos_token_id": [11, 18], "pad_token_id": 3, "min_new_tokens": 5},
]


def generate_on_gpu(model, **options):
    torch.manual_seed(0)
    to = model.device
    options = {name: value.to(to) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    return model.generate(PROMPT.to(to), **{"max_new_tokens": 80, "eos_token_id": None, **options})


@pytest.mark.parametrize(
    ("name", "device"), [("llama", "cuda"), ("gemma3", "cuda"), pytest.param("llama", "cuda:1", marks=TWO_GPUS)]
)
def test_generate(blocks, name, device):
    """Steps are captured, with windows that fill, and give the tokens of transformers' own loop."""
    model = lively(name).to(device)
    expected = [generate_on_gpu(model, **options) for options in CALLS]
    report = blocks.accelerate(model, graphs=True)
    (counts,) = report.generation.values()
    for _ in range(3):
        for options, tokens in zip(CALLS, expected, strict=True):
            assert torch.equal(generate_on_gpu(model, **options), tokens), options
    assert not counts.eager
    assert not counts.eager_steps
    assert counts.replays > 10 * counts.captured
    blocks.restore(model)
    assert counts.memory == 0
    assert torch.equal(generate_on_gpu(model), expected[0])


@TWO_GPUS
def test_traced_on_another_device_than_the_current_one(blocks):
    model = model_of("llama").to("cuda:1", torch.bfloat16)
    inputs = {"input_ids": torch.randint(61, (2, 16), device="cuda:1"), "use_cache": False}
    expected = model(**inputs).logits
    report = blocks.accelerate(model)
    assert is_same(model(**inputs).logits, expected) and report.replaced and torch.cuda.current_device() == 0


def test_generate_with_candidates(blocks):
    """Sampling among the best tokens of a large vocabulary gives the same tokens for the same seed.

    In bfloat16, products that are joined round otherwise: the first call may not compute them one by one.
    """
    model = lively(vocab_size=3001).to("cuda", torch.bfloat16)
    report = blocks.accelerate(model, graphs=True)
    first, *others = [generate_on_gpu(model, **CALLS[2]) for _ in range(3)]
    assert all(torch.equal(first, tokens) for tokens in others)
    assert not next(iter(report.generation.values())).eager


def test_generate_in_threads(blocks):
    model = lively().cuda()
    expected = generate_on_gpu(model)
    blocks.accelerate(model, graphs=True)

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            return [model.generate(PROMPT.cuda(), max_new_tokens=80, eos_token_id=None) for _ in range(4)]

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(tokens, expected) for outputs in pool.map(work, range(4)) for tokens in outputs)


def test_graph_goes_with_its_cache(blocks):
    model = llama().to("cuda", torch.bfloat16)
    counts = graphed(blocks, model)
    cache = StaticCache(model.config, max_cache_len=32)
    decode(model, cache, 5, "cuda")
    assert counts.held == 1
    keys = weakref.ref(cache.layers[0].keys)
    del cache
    gc.collect()
    assert keys() is None, "a graph keeps the cache's tensors"
    model(input_ids=torch.tensor([[1]], device="cuda"), use_cache=False)
    assert counts.held == 0


def test_streams(blocks):
    model = ltx_on_gpu()
    counts = graphed(blocks, model)
    inputs = [inputs_on_gpu() for _ in range(8)]
    expected = [without_graphs(blocks, model, each).sample for each in inputs]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outputs = []
    for number, each in enumerate(inputs):
        with torch.cuda.stream(streams[number % 3]):
            torch.cuda._sleep(1_000_000 * (8 - number))
            outputs.append(model(**each).sample)
    torch.cuda.synchronize()
    assert counts.replays == 6
    assert all(is_same(*pair) for pair in zip(outputs, expected))


def test_threads(blocks):
    models = [ltx_on_gpu(), ltx_on_gpu()]
    counts = [graphed(blocks, model) for model in models]
    inputs = [inputs_on_gpu(frames) for frames in (1, 2, 1, 2)]
    expected = [[without_graphs(blocks, model, each).sample for each in inputs] for model in models]

    def work(number):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(20):
                output = models[number % 2](**inputs[number // 2]).sample
                torch.cuda.current_stream().synchronize()
                assert is_same(output, expected[number % 2][number // 2])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    # For each of two shapes a capture, and before it a call of each of its two threads at most.
    assert all(each.captured == 2 and each.replays >= 4 * 20 - 2 * 3 for each in counts), counts


def test_restore_frees_the_memory(blocks):
    model = ltx_on_gpu()

    def used():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    model(**inputs_on_gpu())
    allocated, reserved = used()
    counts = graphed(blocks, model)
    for frames in (2, 4, 40):
        for _ in range(3):
            model(**inputs_on_gpu(frames))
    assert counts.held == 3
    blocks.restore(model)
    # cuBLAS keeps a workspace for the stream of the captures.
    workspace = 64 * 2**20
    assert used()[0] <= allocated + workspace
    assert used()[1] <= reserved + 2 * workspace


def test_caller_that_captures(blocks):
    model, inputs = ltx_on_gpu(), inputs_on_gpu()
    counts = graphed(blocks, model)
    expected = model(**inputs).sample
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(**inputs).sample
    graph.replay()
    assert is_same(output, expected)
    assert counts.eager["the caller captures a graph"] == 1
