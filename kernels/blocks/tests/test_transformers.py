"""Text models of transformers: the kernels that run, and the accuracy of results and gradients."""

import copy

import pytest
import torch
from model_cases import DEVICE, RecordedModel, error
from text_models import CONFIGS, PADDED, TABLE, TOKENS, logits, model_of
from torch import nn
from transformers import DynamicCache

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_device_of_the_kernels")
MODELS = pytest.mark.parametrize("name", sorted(CONFIGS))
KERNELS = TABLE["kernels"]


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "eager") for name in sorted(CONFIGS)] + [(name, "sdpa") for name in sorted(set(CONFIGS) - {"gemma2"})],
)
def test_float32_is_as_eager(blocks, name, attention):
    model = model_of(name, attention=attention)
    faster = RecordedModel(blocks, model)
    assert error(logits(faster), logits(model)) < 1e-5
    assert faster.kernels == KERNELS[name]


@pytest.mark.parametrize(("name", "autocast"), [*((name, False) for name in sorted(CONFIGS)), ("qwen3", True)])
@torch.no_grad()
def test_bfloat16_is_as_close_to_float32_as_eager(blocks, name, autocast):
    errors, eager_errors = [], []
    for seed in range(5):
        model = model_of(name, seed)
        expected = logits(model)
        if not autocast:
            model.bfloat16()
        faster = RecordedModel(blocks, model)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            own, ours = logits(model), logits(faster)
        assert ours.dtype == own.dtype
        eager_errors.append(error(own, expected))
        errors.append(error(ours, expected))
    assert sum(errors) <= 1.1 * sum(eager_errors)
    assert autocast or faster.kernels == KERNELS[name]


@MODELS
def test_gradients_are_as_eagers(blocks, name):
    model = model_of(name).train()
    gradients = []
    for each in (model, RecordedModel(blocks, model)):
        loss = each(TOKENS, attention_mask=PADDED, labels=TOKENS, use_cache=False).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for (path, _), expected, actual in zip(model.named_parameters(), *gradients):
        assert error(actual, expected) < 1e-4, path


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # the name of earlier releases
@MODELS
@torch.no_grad()
def test_calls_with_a_cache_are_eagers(blocks, name):
    model = model_of(name).model
    cache = DynamicCache(config=model.config)
    model(TOKENS[:, :8], past_key_values=cache, use_cache=True)
    caches = cache, copy.deepcopy(cache)
    outputs = [
        each(TOKENS[:, 8:], past_key_values=own, use_cache=True).last_hidden_state
        for each, own in zip((model, RecordedModel(blocks, model)), caches)
    ]
    assert error(*outputs) < 1e-5


@pytest.mark.parametrize(
    ("name", "inputs", "options", "masked"),
    [
        ("llama", {}, {}, False),
        ("mistral", {}, {}, False),
        ("qwen3", {}, {}, False),
        ("gemma3", {}, {}, False),
        ("qwen3", {"inputs_embeds": True}, {}, False),
        ("qwen3", {}, {"sliding_window": 12}, False),
        ("qwen3", {}, {"sliding_window": 8, "max_window_layers": 0}, True),
        ("qwen3", {"attention_mask": PADDED}, {}, True),
        ("qwen3", {"position_ids": torch.arange(12, device=DEVICE)[None] % 5}, {}, True),
    ],
)
@torch.no_grad()
def test_a_graph_has_a_mask_where_the_model_needs_one(blocks, name, inputs, options, masked):
    model = model_of(name, attention="sdpa", **{"sliding_window": 13, **options})
    embeddings = {"inputs_embeds": model.get_input_embeddings()(TOKENS)}
    inputs = embeddings if "inputs_embeds" in inputs else {"input_ids": TOKENS, **inputs}
    expected = model(**inputs, use_cache=False).logits
    faster = RecordedModel(blocks, model)
    torch.testing.assert_close(faster(**inputs, use_cache=False).logits, expected)
    calls = [node for node in faster.graph.nodes if node.target is nn.functional.scaled_dot_product_attention]
    has_mask = [node.kwargs["attn_mask"] is not None for node in calls]
    assert has_mask == [masked] * 2


@torch.no_grad()
def test_hidden_states_and_attentions(blocks):
    model = model_of("qwen3", attention="eager")
    options = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    expected, actual = model(TOKENS, **options), RecordedModel(blocks, model)(TOKENS, **options)
    assert len(actual.hidden_states) == 3 and len(actual.attentions) == 2
    torch.testing.assert_close(actual.hidden_states, expected.hidden_states)
    torch.testing.assert_close(actual.attentions, expected.attentions)


def test_float32_norms_in_a_bfloat16_model(blocks):
    model = model_of("gemma3").bfloat16()
    for module in model.modules():
        if type(module).__name__ == "Gemma3RMSNorm":
            module.float()
    faster = RecordedModel(blocks, model)
    assert error(logits(faster), logits(model)) < 0.02
    assert faster.kernels == KERNELS["gemma3"]


@pytest.mark.parametrize(
    ("name", "change", "gated"),
    [
        ("llama", {"hidden_act": "relu"}, {}),
        ("phi3", {"hidden_act": "relu"}, {}),
        ("gemma2", {"hidden_activation": "relu"}, {}),
        ("qwen2", {"hidden_act": "gelu"}, {"geglu_pair": 2}),
        ("qwen2", {"hidden_act": "gelu_pytorch_tanh"}, {"geglu_pair": 2}),
    ],
)
def test_other_activations(blocks, name, change, gated):
    model = model_of(name, **change)
    faster = RecordedModel(blocks, model)
    assert error(logits(faster), logits(model)) < 1e-5
    own = ("swiglu_pair", "geglu_pair")
    assert {kernel: count for kernel, count in faster.kernels.items() if kernel in own} == gated


def test_norms_with_other_settings_or_classes(blocks):
    model = model_of("qwen3")
    model.model.layers[0].self_attn.k_norm.variance_epsilon = 1e-3
    model.model.layers[1].post_attention_layernorm = nn.RMSNorm(64, eps=1e-6)
    faster = RecordedModel(blocks, model)
    assert error(logits(faster), logits(model)) < 1e-5
    assert faster.kernels == {**KERNELS["qwen3"], "rms_norm": 3, "norm_rotary": 1, "apply_rotary": 1}
