"""Text models of transformers: small random ones, accelerated, beside themselves."""

import copy
import inspect
import sys

import pytest
import torch
from example_models import DEVICE
from graph_models import module_of
from text_models import CONFIGS, PADDED, TOKENS, error, logits, model_of, ops_of
from torch import nn
from transformers import DynamicCache

# The replacements in a layer besides its norms, by the end of the name of its class.
REPLACED = {
    name: {"Attention", "MLP", "RMSNorm", "TextModel" if name == "gemma3" else "Model"}
    | ({"DecoderLayer"} if name != "olmo2" else set())
    for name in CONFIGS
}
pytestmark = pytest.mark.usefixtures("on_the_device_of_the_kernels")
MODELS = pytest.mark.parametrize("name", sorted(CONFIGS))


def accelerated(blocks, model):
    model = copy.deepcopy(model)
    blocks.accelerate(model)
    return model


@MODELS
def test_every_module_with_a_kernel_is_replaced(blocks, name):
    model = model_of(name)
    report = blocks.accelerate(model)
    assert not report.left
    assert {cls[len(type(model.model.layers[0]).__name__) - len("DecoderLayer") :] for cls, _ in report.replaced} == (
        REPLACED[name]
    )
    rotary = {"norm_rotate"} if name in ("gemma3", "olmo2", "qwen3") else {"rotate_tokens"}
    gated = {"geglu_halves"} if name == "phi3" else {"geglu_pair"}
    summed = {"add_rms_norm"} if name != "olmo2" else set()
    assert ops_of(model) == {"rms_norm"} | rotary | gated | summed


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "eager") for name in sorted(CONFIGS)] + [(name, "sdpa") for name in sorted(set(CONFIGS) - {"gemma2"})],
)
def test_float32_is_as_eager(blocks, name, attention):
    model = model_of(name, attention=attention)
    expected = logits(model)
    assert error(logits(accelerated(blocks, model)), expected) < 1e-5


@MODELS
def test_bfloat16_is_as_close_to_float32_as_eager(blocks, name):
    errors, eager_errors = [], []
    for seed in range(5):
        model = model_of(name, seed)
        expected = logits(model)
        model.bfloat16()
        eager_errors.append(error(logits(model), expected))
        errors.append(error(logits(accelerated(blocks, model)), expected))
    assert sum(errors) <= 1.1 * sum(eager_errors)


@MODELS
def test_gradients_are_as_eagers(blocks, name):
    model = model_of(name).train()
    faster = accelerated(blocks, model)
    for each in (model, faster):
        each(TOKENS, attention_mask=PADDED, labels=TOKENS).loss.backward()
    for (path, expected), actual in zip(model.named_parameters(), faster.parameters()):
        assert error(actual.grad, expected.grad) < 1e-4, path


@MODELS
def test_generated_tokens_are_eagers(blocks, name):
    model = model_of(name)
    faster = accelerated(blocks, model)
    for cache in (None, "static"):
        options = {"attention_mask": PADDED, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        options["cache_implementation"] = cache
        expected = model.generate(TOKENS, **options)
        assert torch.equal(faster.generate(TOKENS, **options), expected)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@MODELS
def test_caches_by_either_name(blocks, name):
    """transformers 5.24 calls a cache `cache`, and takes the name `past_key_values` of earlier releases, too."""
    model = model_of(name).model
    faster = accelerated(blocks, model)
    names = {"cache", "past_key_values"} & inspect.signature(model.forward).parameters.keys() | {"past_key_values"}
    for argument in names:
        outputs = []
        for each in (model, faster):
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                for tokens in (TOKENS[:, :8], TOKENS[:, 8:]):
                    output = each(tokens, **{argument: cache}, use_cache=True)
            assert cache.get_seq_length() == TOKENS.shape[1]
            outputs.append(output.last_hidden_state)
        assert error(*outputs) < 1e-5


@MODELS
def test_forwards_have_the_parameters_of_their_own(blocks, name):
    model = model_of(name)
    expected = [inspect.signature(module.forward) for module in model.modules()]
    blocks.accelerate(model)
    assert [inspect.signature(module.forward) for module in model.modules()] == expected


@MODELS
def test_restore_is_bitwise(blocks, name):
    model = model_of(name).bfloat16()
    expected, classes = logits(model), [type(module) for module in model.modules()]
    blocks.accelerate(model)
    blocks.restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("name", ["gemma2", "phi3", "qwen3"])
def test_compiled_is_the_models_own_graph(blocks, name):
    model = model_of(name, num_hidden_layers=1, layer_types=["sliding_attention"])
    expected = logits(model)
    blocks.accelerate(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(logits(compiled), expected)


class Attended:
    """Records the masks that attention gets."""

    def __init__(self, monkeypatch):
        self.masks = []
        attention = torch.nn.functional.scaled_dot_product_attention

        def attend(*tensors, attn_mask=None, **options):
            self.masks.append(attn_mask)
            return attention(*tensors, attn_mask=attn_mask, **options)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)


@pytest.mark.parametrize(
    ("name", "inputs", "options", "masked"),
    [
        ("llama", {}, {}, False),
        ("mistral", {}, {}, False),
        ("qwen3", {}, {}, False),
        ("gemma3", {}, {}, False),
        ("qwen3", {"inputs_embeds": True}, {}, False),
        ("qwen3", {}, {"sliding_window": 12}, None),
        ("qwen3", {"attention_mask": PADDED}, {}, True),
        ("qwen3", {"position_ids": torch.arange(12, device=DEVICE)[None] % 5}, {}, True),
        ("gemma3", {}, {"use_bidirectional_attention": True}, None),
    ],
)
def test_a_graph_has_a_mask_where_the_model_needs_one(blocks, monkeypatch, name, inputs, options, masked):
    model = model_of(name, attention="sdpa", **{"sliding_window": 13, **options})
    if "inputs_embeds" in inputs:
        inputs = {"inputs_embeds": model.get_input_embeddings()(TOKENS)}
    else:
        inputs = {"input_ids": TOKENS, **inputs}
    faster = accelerated(blocks, model)
    attended = Attended(monkeypatch)
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        # transformers and the package ask these whether a graph is captured.
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(module_of(blocks, "kernel_set"), "is_capturing", lambda: True)
        actual = faster(**inputs, use_cache=False).logits
    has_mask = [mask is not None for mask in attended.masks]
    assert has_mask[:2] == has_mask[2:] and (masked is None or has_mask == [masked] * 4)
    torch.testing.assert_close(actual, expected)


def test_a_function_in_place_of_that_which_makes_masks_gets_the_position_ids(blocks, monkeypatch):
    model = model_of("qwen3", attention="sdpa")
    blocks.accelerate(model)
    module, given = sys.modules[type(model.model).__module__], []
    own = module.create_causal_mask

    def other(**options):
        given.append(options["position_ids"])
        return own(**options)

    monkeypatch.setattr(module, "create_causal_mask", other)
    monkeypatch.setattr(module_of(blocks, "kernel_set"), "is_capturing", lambda: True)
    with torch.no_grad():
        model(TOKENS, use_cache=False)
    assert given and given[0] is not None


def test_hidden_states_and_attentions_are_recorded(blocks):
    model = model_of("qwen3", attention="eager")
    faster = accelerated(blocks, model)
    options = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected, actual = model(TOKENS, **options), faster(TOKENS, **options)
    assert len(actual.hidden_states) == 3 and len(actual.attentions) == 2
    torch.testing.assert_close(actual.hidden_states, expected.hidden_states)
    torch.testing.assert_close(actual.attentions, expected.attentions)


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_gradient_checkpointing(blocks, name):
    model = model_of(name).train()
    faster = accelerated(blocks, model)
    faster.gradient_checkpointing_enable()
    for each in (model, faster):
        each(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    expected, actual = model.model.embed_tokens.weight.grad, faster.model.embed_tokens.weight.grad
    assert error(actual, expected) < 1e-4


def test_float32_norms_in_a_bfloat16_model(blocks):
    model = model_of("gemma3").bfloat16()
    for module in model.modules():
        if type(module).__name__ == "Gemma3RMSNorm":
            module.float()
    expected = logits(model)
    assert error(logits(accelerated(blocks, model)), expected) < 0.02


# --- modules with their own forward-----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("llama", {"hidden_act": "relu"}, "its activation is ReLU, which no kernel computes"),
        ("phi3", {"hidden_act": "relu"}, "its activation is ReLU, which no kernel computes"),
        ("gemma2", {"hidden_activation": "relu"}, "its activation is ReLU, which no kernel computes"),
    ],
)
def test_activation_without_kernel(blocks, name, change, reason):
    model = model_of(name, **change)
    expected = logits(model)
    report = blocks.accelerate(model)
    assert {words for _, words in report.left} == {reason}
    assert error(logits(model), expected) < 1e-5


@pytest.mark.parametrize(("activation", "op"), [("gelu", "geglu_pair"), ("gelu_pytorch_tanh", "geglu_pair")])
def test_other_activations_with_kernel(blocks, activation, op):
    model = model_of("qwen2", hidden_act=activation)
    expected = logits(model)
    report = blocks.accelerate(model)
    assert not report.left and op in ops_of(model)
    assert error(logits(model), expected) < 1e-5


def test_norms_with_other_settings_or_classes(blocks):
    model = model_of("qwen3")
    attention, layer = model.model.layers[0].self_attn, model.model.layers[1]
    attention.k_norm.variance_epsilon = 1e-3
    layer.post_attention_layernorm = nn.RMSNorm(64)
    expected = logits(model)
    assert not blocks.accelerate(model).left
    assert error(logits(model), expected) < 1e-5


class AddOne(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"olmo2"}))
@pytest.mark.parametrize("change", ["hook", "wrapper"])
def test_norms_and_activations_changed_later_are_called(blocks, name, change):
    model = model_of(name)
    faster = accelerated(blocks, model)
    for each in (model, faster):
        layer = each.model.layers[0]
        norm = (
            "pre_feedforward_layernorm" if hasattr(layer, "pre_feedforward_layernorm") else "post_attention_layernorm"
        )
        activation = "act_fn" if hasattr(layer.mlp, "act_fn") else "activation_fn"
        owners = [(layer, norm), (layer.mlp, activation)]
        if hasattr(layer.self_attn, "q_norm"):
            owners.append((layer.self_attn, "q_norm"))
        for owner, attribute in owners:
            inner = getattr(owner, attribute)
            if change == "hook":
                inner.register_forward_hook(lambda module, args, output: output + 1)
            else:
                setattr(owner, attribute, AddOne(inner))
    assert error(logits(faster), logits(model)) < 1e-5


def test_autocast_is_eagers(blocks):
    model = model_of("qwen3")
    faster = accelerated(blocks, model)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(logits(faster), logits(model))
