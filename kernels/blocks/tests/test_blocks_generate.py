"""Test `generate` with decoding steps as graphs, which the CPU simulates: the same results as transformers' own loop."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from graph_models import accelerate_on_cpu, module_of
from text_models import model_of
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

PROMPT = torch.tensor([[5, 9, 41, 7, 12, 33]])
BATCH = torch.tensor([[0, 0, 41, 7, 12, 33], [5, 9, 17, 7, 12, 30], [0, 3, 4, 5, 6, 7]])
PADDED = (BATCH != 0).long()
SAMPLED = {"do_sample": True, "temperature": 0.8}


def lively(name="llama", **changes):
    """Return a small model whose tokens do not repeat themselves."""
    model = model_of(name, **{"max_position_embeddings": 512, **changes})
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)
    return model.requires_grad_(False)


def accelerated(blocks, model):
    """Return the counts of a model that the CPU "captures"."""
    accelerate_on_cpu(blocks, model)
    return module_of(blocks, "graphs")._decoders[model].counts


def generate(model, prompt=PROMPT, seed=0, **options):
    torch.manual_seed(seed)
    return model.generate(prompt, **{"max_new_tokens": 24, "eos_token_id": None, **options})


def compare(blocks, model, *calls, times=2):
    """Make calls before and after accelerating, some times each. Return the counts."""
    expected = [generate(model, **options) for options in calls]
    counts = accelerated(blocks, model)
    for _ in range(times):
        for options, tokens in zip(calls, expected, strict=True):
            assert torch.equal(generate(model, **options), tokens), options
    return counts


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral", "gemma2"])
def test_greedy(blocks, name):
    padded = {"prompt": BATCH, "attention_mask": PADDED}
    counts = compare(blocks, lively(name), {}, padded)
    assert not counts.eager
    assert counts.eager_steps == {"the first of its length": counts.captured}
    assert counts.calls == 4
    assert counts.steps == 2 * 2 * 23 - counts.captured


def test_try(blocks):
    for options in (
        SAMPLED,
        {**SAMPLED, "top_k": 5, "top_p": 0.8},
        {**SAMPLED, "min_p": 0.1, "typical_p": 0.9, "epsilon_cutoff": 0.01},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": 11},
    ):
        model = lively()
        a = generate(model, **options)
        c = compare(blocks, model, options)
        print(a)
        print(c)
    pass
