"""Test `generate` with decoding steps as graphs, which the CPU simulates: the same results as transformers' loop."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import transformers
from graph_models import accelerate_on_cpu, module_of
from text_models import IMAGE_TEXT, OurOps, image_text_model, lively
from torch import nn
from torch.nn import functional as F
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation import utils as generation_utils

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

CACHE = generation_utils.ALL_CACHE_NAMES[0]  # it differs between releases of transformers
# Before release 5, caches do not tell who made them: each may be the caller's, and no graph computes a prompt.
PROMPT_GRAPHS = int(hasattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL"))
PROMPT = torch.tensor([[5, 9, 41, 7, 12, 33]])
BATCH = torch.tensor([[0, 0, 41, 7, 12, 33], [5, 9, 17, 7, 12, 30], [0, 3, 4, 5, 6, 7]])
PADDED = (BATCH != 0).long()
SAMPLED = {"do_sample": True, "temperature": 0.8}
NEW_TOKENS = 12
"""With the prompt, more than the windows of the models hold."""


def accelerated(blocks, model):
    """Return the counts of a model that the CPU "captures"."""
    accelerate_on_cpu(blocks, model)
    return module_of(blocks, "graphs").decoders[model].counts


def generate(model, prompt=PROMPT, seed=0, **options):
    torch.manual_seed(seed)
    return model.generate(prompt, **{"max_new_tokens": NEW_TOKENS, "eos_token_id": None, **options})


def compare(blocks, model, *calls, times=2):
    """Make calls before and after accelerating, some times each. Return the counts."""
    expected = [generate(model, **options) for options in calls]
    counts = accelerated(blocks, model)
    for _ in range(times):
        for options, tokens in zip(calls, expected, strict=True):
            assert torch.equal(generate(model, **options), tokens), options
    return counts


# q, k, v; output projection; gate and up; down projection with residual: twice, and the logits. They normalize.
STEP = {"linear": 7, "gated_linear": 2, "cached_attention": 2}
BETWEEN = {"rms_norm": 4, "add_rms_norm": 4}  # norms of products, and sums before norms
WIDE = {"head_dim": 64}


@pytest.mark.parametrize(
    ("name", "sizes", "ops"),
    [
        ("llama", {}, {**STEP, "rotate_tokens": 2}),
        ("qwen3", {}, {**STEP, "norm_rotate": 2}),
        ("mistral", {}, {**STEP, "rotate_tokens": 2}),
        ("gemma3", {}, {**STEP, **BETWEEN, "norm_rotate": 2}),
        # Its attention limits the products of q and k, which only transformers' own function does.
        ("gemma2", {}, {"linear": 7, "gated_linear": 2, "rotate_tokens": 2, **BETWEEN}),
        ("phi3", {}, {"linear": 9, "cached_attention": 2, "rotate_tokens": 2}),
        # Attention with heads of this size rotates.
        ("llama", WIDE, STEP),
        ("qwen3", WIDE, STEP),
        ("gemma3", WIDE, {**STEP, **BETWEEN}),
    ],
)
def test_greedy(blocks, name, sizes, ops):
    """Tokens, and the kernels of a step."""
    model, padded = lively(name, **sizes), {"prompt": BATCH, "attention_mask": PADDED}
    counts = compare(blocks, model, {}, padded)
    assert not counts.eager
    assert not counts.eager_steps
    assert counts.generated == 4
    assert counts.replays == 2 * 2 * (NEW_TOKENS - 1) + PROMPT_GRAPHS  # the second prompt without padding
    with OurOps("decode", "rmsnorm", "rope3d") as calls:
        generate(model, **padded)
    if blocks.kernel_set.DEVICE == "cpu":
        assert calls.ops == {op: number * (NEW_TOKENS - 1) for op, number in ops.items()}


PROMPTS = [
    {"prompt": PROMPT[:, :size], "eos_token_id": [5, 11], "repetition_penalty": 1.2, "max_new_tokens": 9 + size}
    for size in (6, 3, 4)
]
CLASSES = "llama", "gemma3"
LONG = torch.randint(3, 60, (2, 80), generator=torch.Generator().manual_seed(0))
EMBEDDED = {"prompt": None, "inputs_embeds": torch.linspace(-1, 1, 6 * 64).view(1, 6, 64)}


@pytest.mark.parametrize(
    ("name", "calls", "graphs"),
    [
        ("llama", PROMPTS, 2),
        *((name, [{"cache_implementation": "static"}, {"prefill_chunk_size": 4}, {}], 2) for name in CLASSES),
        ("llama", [EMBEDDED], 1),
        *((name, [{"prompt": LONG[:, :size]} for size in (65, 72, 80)], 2) for name in CLASSES),
    ],
)
def test_one_graph_serves_calls(blocks, name, calls, graphs):
    """One of steps, and one of prompts of about a length."""
    counts = compare(blocks, lively(name), *calls)
    assert not counts.eager
    assert not counts.eager_steps
    assert counts.captured == min(graphs, 1 + PROMPT_GRAPHS)


def test_prompt_that_sees_later_tokens(blocks):
    model = lively()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    assert compare(blocks, model, {}, {"prompt": LONG}).captured == 2  # steps of each batch


PROCESSED = [
    {**SAMPLED},
    {**SAMPLED, "top_k": 5, "top_p": 0.8},
    {**SAMPLED, "top_k": 0, "min_p": 0.1, "typical_p": 0.9, "epsilon_cutoff": 0.01},
    {**SAMPLED, "renormalize_logits": True, "remove_invalid_values": True, "suppress_tokens": [7, 9]},
    {"repetition_penalty": 1.7},
]


def test_processors(blocks):
    padded = {"repetition_penalty": 1.3, "prompt": BATCH, "attention_mask": PADDED}
    counts = compare(blocks, lively(), *PROCESSED, padded)
    assert not counts.eager
    by_hand = {"the logits processor RepetitionPenaltyLogitsProcessor cannot be part of a graph": 2}
    assert counts.by_hand in (by_hand, {})  # before transformers 5.23, the penalty is also for padding
    assert counts.captured == (1 + PROMPT_GRAPHS) * len(PROCESSED) + 1


def test_products_that_something_else_reads(blocks):
    """Products are computed with a sum, a gate or a norm only if nothing else reads or writes these."""
    recording, decoding, fusions = (module_of(blocks, name) for name in ("recording", "decoding", "fusions"))

    def norm(x):
        return F.rms_norm(x, (16,), other[0], 1e-5)

    x, residual = torch.randn(2, 1, 16), torch.randn(2, 1, 16)
    weight, other = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))
    uses = [
        lambda x, product: residual + product,
        lambda x, product: product + residual,
        lambda x, product: (product + residual) * product,
        lambda x, product: product + 1,
        lambda x, product: product + residual[0],
        lambda x, product: product + product,
        lambda x, product: torch.cat([residual, product]),
        lambda x, product: torch.add(residual, product, alpha=2),
        lambda x, product: product.mT,
        lambda x, product: F.linear(product, weight) + F.linear(x, other),
        lambda x, product: product + F.linear(x, other) + F.linear(x.mul_(2), other),
        lambda x, product: F.silu(product) * F.linear(product, other),
        lambda x, product: F.linear(norm(product + residual), other),
        lambda x, product: F.linear(norm(total := product + residual), other) + F.linear(total, weight),
        lambda x, product: F.linear(normed := norm(product), other) + normed,
        lambda x, product: product + F.linear(normed := norm(x), other) + F.linear(normed[:1], weight),
        lambda x, product: (normed := norm(x)) + product + F.linear(normed[:, -1:], other),
        lambda x, product: F.linear((norm(x), x.mul_(2))[0], other) + product,
    ]
    for use in uses:
        recorded = recording.record(nn.Module, lambda x, use=use: use(x, F.linear(x, weight)), (x.clone(),), {})
        fusions.fuse(recorded.module)
        decoding.fuse_step(recorded.module)
        changed = x.clone()
        torch.testing.assert_close(recorded.run(x.clone()), use(changed, F.linear(changed, weight)))


class Banned(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(1, input_ids[0, -2:], float("-inf"))


class Repeats(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == 18


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"logits_processor": LogitsProcessorList([Banned()])}, "the logits processor Banned cannot be part"),
        ({**SAMPLED, "eta_cutoff": 0.01}, "the logits processor EtaLogitsWarper cannot be part of a graph"),
        ({"no_repeat_ngram_size": 2}, "the logits processor NoRepeatNGramLogitsProcessor cannot be part of a graph"),
        ({"bad_words_ids": [[7]], "min_length": 8}, "the logits processor NoBadWordsLogitsProcessor cannot be part"),
        ({"forced_eos_token_id": 11}, "the logits processor ForcedEOSTokenLogitsProcessor cannot be part of a graph"),
        ({"stopping_criteria": StoppingCriteriaList([Repeats()])}, "the stopping criterion Repeats cannot be part of"),
    ],
)
def test_tokens_are_chosen_step_by_step(blocks, options, reason):
    calls = options, {**options, "prompt": BATCH, "attention_mask": PADDED, "eos_token_id": [11, 18], "pad_token_id": 3}
    counts = compare(blocks, lively(), *calls)
    assert list(counts.by_hand.values()) == [4]
    assert next(iter(counts.by_hand)).startswith(reason)
    assert not counts.eager
    assert counts.replays > 20


def test_ends_of_sequences(blocks):
    model = lively()
    tokens = generate(model, prompt=BATCH, attention_mask=PADDED)[:, 6:].tolist()
    ends = [row[at] for row, at in zip(tokens, (2, 6, 9))]
    padded = {"prompt": BATCH, "attention_mask": PADDED, "pad_token_id": 3}
    calls = [{**padded, "eos_token_id": ids} for ids in (ends, ends[0])]
    calls += [{"eos_token_id": generate(model)[0, at].item()} for at in (6, 7, -1)]
    calls += [{"max_new_tokens": count} for count in (1, 2, 3)]
    counts = compare(blocks, model, *calls)
    assert counts.eager == {"it is about one token": 2}


@pytest.mark.parametrize("last", [6, 10])
def test_random_numbers_go_on_the_same(blocks, last):
    model = lively()
    options = {**SAMPLED, "eos_token_id": generate(model, **SAMPLED)[0, last].item()}
    accelerated(blocks, model)
    following = []
    for _ in range(3):
        assert generate(model, **options).shape[1] == last + 1
        following.append(torch.rand(1))
    assert following[0] == following[1] == following[2]


def test_streamer(blocks):
    model = lively()
    criteria = StoppingCriteriaList([Repeats()])
    calls = {}, {"eos_token_id": generate(model)[0, 10].item()}, {"stopping_criteria": criteria}

    def streamed(options):
        tokens = []
        streamer = SimpleNamespace(put=lambda value: tokens.append(value.tolist()), end=lambda: tokens.append("end"))
        generate(model, streamer=streamer, **options)
        return tokens

    expected = [streamed(options) for options in calls]
    counts, captured = accelerated(blocks, model), []
    generate(model, streamer=SimpleNamespace(put=lambda _: captured.append(counts.captured), end=list))
    assert captured[:3] == [0, 0, 1]  # the prompt, and the first token, which waits for no capture
    assert [streamed(options) for options in calls] == expected


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_dictionary_of_outputs(blocks, name):
    model = lively(name)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options["eos_token_id"] = generate(model)[0, 14].item()
    calls = [{**options, **SAMPLED}, {**options, "logits_processor": LogitsProcessorList([Banned()])}]
    expected = [generate(model, **call) for call in calls]
    accelerated(blocks, model)
    for _ in range(2):
        for call, theirs in zip(calls, expected):
            ours = generate(model, **call)
            assert type(ours) is type(theirs)
            assert ours.keys() == theirs.keys()
            assert torch.equal(ours.sequences, theirs.sequences)
            for kind in ("scores", "logits"):
                torch.testing.assert_close(ours[kind], theirs[kind])
            assert type(ours[CACHE]) is DynamicCache
            assert ours[CACHE].get_seq_length() == theirs[CACHE].get_seq_length()
            for own, their in zip(ours[CACHE].layers, theirs[CACHE].layers):
                torch.testing.assert_close((own.keys, own.values), (their.keys, their.values))
    longer = torch.cat([ours.sequences, PROMPT], 1)
    following = [generate(model, longer, **{CACHE: outputs[CACHE]}) for outputs in (ours, theirs)]
    assert torch.equal(*following)


def test_max_time(blocks):
    model = lively()
    counts = accelerated(blocks, model)
    assert 7 <= generate(model, max_time=1e-9).shape[1] <= 8
    assert generate(model, max_time=1e9).shape[1] == 6 + NEW_TOKENS
    assert counts.generated == 2


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_memory_grows_with_the_text(blocks, name, monkeypatch):
    monkeypatch.setattr(module_of(blocks, "generation"), "_ROOM", 1)
    # The window is wider than the first memory, and narrower than the last and than the longest text.
    window = {"sliding_window": 70} if name == "gemma3" else {}
    padded = {"prompt": BATCH, "attention_mask": PADDED, "max_new_tokens": 62}
    calls = {"max_new_tokens": 74}, {"max_new_tokens": 8}, padded
    decoded = lively(name, **window)
    counts = compare(blocks, decoded, *calls)
    assert not counts.eager
    captured = counts.captured
    for options in calls:
        generate(decoded, **options)
    assert counts.captured == captured >= 2


def test_memory_is_bounded(blocks, monkeypatch):
    generation = module_of(blocks, "generation")
    model = lively()
    counts = accelerated(blocks, model)
    decoder = module_of(blocks, "graphs").decoders[model]
    for batch in range(1, 7):
        generate(model, PROMPT.expand(batch, -1))
    assert [state.kind[0] for state in decoder._free] == [3, 4, 5, 6]
    held = counts.memory
    monkeypatch.setattr(generation, "_SHARE", decoder._free[-1].bytes / 2**40)
    generate(model, PROMPT.expand(6, -1))
    assert [state.kind[0] for state in decoder._free] == [6]
    assert counts.memory < held
    blocks.restore(model)
    assert counts.memory == 0


def own_cache(model, kind):
    return kind(model.config, max_cache_len=64) if kind is StaticCache else kind(config=model.config)


def states_of(cache):
    """Return copies of each layer's cached tensors, in order."""
    length = int(cache.get_seq_length())
    return [(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone()) for layer in cache.layers]


@pytest.mark.parametrize("window", [None, 20, 80])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_cache_of_the_caller(blocks, kind, window):
    """It has the states of the text afterwards, and the next call goes on from them."""
    model = lively("gemma3", sliding_window=window) if window else lively()

    def talk(prompt, mask):
        cache, turns = own_cache(model, kind), []
        for count in (24, 8, 8):
            tokens = generate(model, prompt, attention_mask=mask, max_new_tokens=count, **{CACHE: cache})
            turns.append((tokens, states_of(cache)))
            prompt = torch.cat([tokens, tokens[:, :3]], 1)
            mask = torch.nn.functional.pad(mask, (0, prompt.shape[1] - mask.shape[1]), value=1)
        return turns

    starts = [(PROMPT, torch.ones_like(PROMPT)), (BATCH, PADDED)]
    expected = [talk(*start) for start in starts]
    counts = accelerated(blocks, model)
    for _ in range(2):
        for start, theirs in zip(starts, expected, strict=True):
            for (own, own_states), (their, their_states) in zip(talk(*start), theirs, strict=True):
                assert torch.equal(own, their)
                torch.testing.assert_close(own_states, their_states)
    assert not counts.eager
    assert counts.generated == 12


def test_cache_without_layers_yet(blocks):
    model, cache = lively(), DynamicCache()
    expected = generate(model)
    counts = accelerated(blocks, model)
    assert torch.equal(generate(model, **{CACHE: cache}), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    assert not counts.eager


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache_implementation": "dynamic"}, "the caller asked for a cache: dynamic"),
        ({"use_cache": False}, "it has no cache"),
        ({"num_beams": 2}, "beams"),
        ({"prompt_lookup_num_tokens": 2}, "candidates of an assistant"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states is set"),
    ],
)
def test_calls_as_before(blocks, options, reason):
    model = lively()
    expected = model.generate(PROMPT, max_new_tokens=8, do_sample=False, **options)
    counts = accelerated(blocks, model)
    actual = model.generate(PROMPT, max_new_tokens=8, do_sample=False, **options)
    assert torch.equal(getattr(actual, "sequences", actual), getattr(expected, "sequences", expected))
    assert counts.eager == {reason: 1}


def test_continuous_batching(blocks):
    """transformers' own loop, which captures graphs itself, has the model's own forward."""
    model, prompts = lively(), [PROMPT[0].tolist(), [3, 4, 5]]
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
    sizes = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, max_memory_percent=0.01)

    def batch():
        outputs = model.generate_batch(prompts, config, sizes)
        return [outputs[name].generated_tokens for name in sorted(outputs)]

    expected = batch()
    assert expected[0] == generate(model, max_new_tokens=4)[0, 6:].tolist()
    report = blocks.accelerate(model)
    assert batch() == expected
    assert any(reason.startswith("generate_batch") for _, reason in report.left)
    counts = accelerate_on_cpu(blocks, model)
    assert batch() == expected
    assert all("PagedAttentionCache" in reason for reason in counts.eager)
    assert counts.eager


def test_models_that_are_left(blocks):
    model = lively()
    counts = accelerated(blocks, model)
    hook = model.model.layers[0].register_forward_hook(lambda *arguments: None)
    generate(model)
    hook.remove()
    generate(model)
    assert counts.eager == {"model.layers.0 has hooks": 1}
    assert counts.generated == 1


def test_capture_that_fails(blocks):
    model = lively()
    expected = generate(model)
    accelerate_on_cpu(blocks, model, error="it waits for the GPU")
    counts = module_of(blocks, "graphs").decoders[model].counts
    for _ in range(2):
        assert torch.equal(generate(model), expected)
    assert counts.eager_steps == {"it waits for the GPU": NEW_TOKENS - 1}
    assert counts.eager == {"it waits for the GPU": 1}


def test_model_that_changes(blocks):
    model, counts_of = lively(), []
    counts = accelerated(blocks, model)
    for _ in range(2):
        expected = generate(copy.deepcopy(model))
        for _ in range(2):
            assert torch.equal(generate(model), expected)
        counts_of.append(counts.captured)
        model.lm_head = torch.nn.Linear(64, 99, bias=False)
    assert counts_of == [1 + PROMPT_GRAPHS, 2 + 2 * PROMPT_GRAPHS]


def test_inference_mode_and_autocast(blocks):
    model = lively()
    expected = generate(model)
    counts = accelerated(blocks, model)
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(generate(model), expected)
        assert torch.equal(generate(model), expected)
    assert counts.captured == 2 + 2 * PROMPT_GRAPHS
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(generate(model), generate(copy.deepcopy(model)))
    assert counts.eager == {"autocast is on": 1}


def test_threads(blocks):
    model = lively()
    prompts = [torch.tensor([[number + 3, 9, 41, 7]]) for number in range(6)]
    expected = [generate(model, prompt) for prompt in prompts]
    counts = accelerated(blocks, model)

    def work(prompt):
        return [model.generate(prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None) for _ in range(3)]

    with ThreadPoolExecutor(len(prompts)) as pool:
        for tokens, own in zip(pool.map(work, prompts), expected):
            assert all(torch.equal(each, own) for each in tokens)
    assert counts.generated == 18
    assert not counts.eager
    assert counts.replays > 50


def test_adapters(blocks):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(lively(), LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    base = model.base_model.model
    with_adapter = generate(model)
    report = blocks.accelerate(model, graphs=True)
    assert list(report.generation) == ["LlamaForCausalLM"]
    accelerate_on_cpu(blocks, model)
    counts = module_of(blocks, "graphs").decoders[base].counts
    for _ in range(2):
        assert torch.equal(generate(model), with_adapter)
        with model.disable_adapter():
            without = generate(model)
            assert torch.equal(without, generate(model))
            assert not torch.equal(without, with_adapter)
    assert not counts.eager
    assert counts.replays
    blocks.restore(model)
    assert torch.equal(generate(model), with_adapter)


def test_pipeline(blocks):
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast, pipeline

    characters = Tokenizer(BPE({chr(33 + number): number for number in range(94)}, []))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="!", eos_token="#", padding_side="left")
    model = lively()
    pipe = pipeline("text-generation", model, tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": 2}
    texts = ["abcdef", "xyz"]
    expected = pipe(texts, **options)
    stop = {**options, "stop_strings": [expected[0][0]["generated_text"][8:10]], "tokenizer": tokenizer}
    stopped = pipe(texts[0], **stop)
    counts = accelerated(blocks, model)
    for _ in range(2):
        assert pipe(texts, **options) == expected
        assert pipe(texts[0], **stop) == stopped
    assert not counts.eager
    assert counts.by_hand == {"the stopping criterion StopStringCriteria cannot be part of a graph": 2}
    generate(model, streamer=TextStreamer(tokenizer))


def test_copies_pickles_and_restore(blocks):
    model = lively()
    own, expected = type(model), generate(model)
    counts = accelerated(blocks, model)
    copied = copy.deepcopy(model)
    is_local = transformers.__version__.startswith("5.22.")  # its functions have classes that no pickle finds again
    loaded = copied if is_local else pickle.loads(pickle.dumps(model))
    assert type(loaded) is own
    for other in (copied, loaded):
        assert torch.equal(generate(other), expected)
    assert counts.generated == 0
    generate(model)
    blocks.restore(model)
    assert type(model) is own
    assert torch.equal(generate(model), expected)
    assert counts.generated == 1
    # A capture of the CPU keeps the model, to run it again.
    accelerate_on_cpu(blocks, model, error="none")
    generate(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", IMAGE_TEXT)
def test_image_text_models(blocks, name):
    """transformers also passes the types of tokens, and the outputs of its encoder, which may be none."""
    model, image = image_text_model(name)
    for call in ({}, image):
        counts = compare(blocks, model, {"pad_token_id": 0, **call})
        assert not counts.eager
        assert (counts.captured, counts.replays) == (1, 2 * (NEW_TOKENS - 1))
        blocks.restore(model)


def test_report(blocks):
    model = lively()
    report = blocks.accelerate(model, graphs=True)
    generate(model)
    assert "generate of LlamaForCausalLM:\n  0 captured, 0 held" in str(report)
    assert "1 x eager: the model is not on a CUDA device" in str(report)
    assert report.to_dict()["generation"]["LlamaForCausalLM"]["eager"] == {"the model is not on a CUDA device": 1}
    assert not blocks.accelerate(model).generation
