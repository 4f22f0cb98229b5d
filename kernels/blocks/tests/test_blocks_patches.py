"""Forwards and functions that a user patched before or after `accelerate`: the patches are called."""

import pytest
import small_image_models
from diffusers import FirstBlockCacheConfig, MagCacheConfig
from diffusers.models.transformers import transformer_flux
from model_cases import built, error
from text_models import logits, model_of
from torch import nn
from transformers import activations
from transformers.models.llama import modeling_llama

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")


def llama():
    model = model_of("llama")
    return model, lambda: logits(model)


def flux():
    case = built(small_image_models.CASES["Flux.1"])
    return case.model, case.run


def patched_norm(own):
    return lambda self, x: own(self, x) * 1.5


def patched_mlp(own):
    def forward(self, x):
        return self.down_proj(nn.functional.relu(self.gate_proj(x)) * self.up_proj(x))

    return forward


def patched_rotary(own):
    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        q, k = own(q, k, cos, sin, unsqueeze_dim)
        return -q, k

    return rotate


def patched_block(own):
    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
        context, x = own(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs)
        return context, x * 1.5

    return forward


def patched_processor(own):
    def call(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return own(self, attn, hidden_states, encoder_hidden_states, attention_mask, None)

    return call


OTHER_CODE = "its forward was replaced by other code"
PATCHES = {
    "LlamaRMSNorm": (
        *(llama, modeling_llama.LlamaRMSNorm, "forward", patched_norm),
        *("LlamaRMSNorm", OTHER_CODE),
    ),
    "LlamaMLP": (llama, modeling_llama.LlamaMLP, "forward", patched_mlp, "LlamaMLP", OTHER_CODE),
    "rotary": (
        *(llama, modeling_llama, "apply_rotary_pos_emb", patched_rotary),
        *("LlamaAttention", "apply_rotary_pos_emb computes no rotary embedding that a kernel does"),
    ),
    "FluxTransformerBlock": (
        *(flux, transformer_flux.FluxTransformerBlock, "forward", patched_block),
        *("FluxTransformerBlock", OTHER_CODE),
    ),
    "FluxAttnProcessor": (
        *(flux, transformer_flux.FluxAttnProcessor, "__call__", patched_processor),
        *("FluxAttention", "its FluxAttnProcessor.__call__ was replaced by other code"),
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", PATCHES)
def test_patch(blocks, monkeypatch, name, when):
    make, owner, attribute, patch, cls, reason = PATCHES[name]
    model, run = make()
    unpatched = run()
    if when == "after":
        blocks.accelerate(model)
        run()
    own = getattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, patch(own))
    actual = run()
    if when == "before":
        report = blocks.accelerate(model)
        actual = run()
        assert any(left == cls and reason in words for left, words in report.left)
    blocks.restore(model)
    expected = run()
    assert error(actual, expected) < 1e-5
    assert error(unpatched, expected) > 1e-3
    monkeypatch.undo()
    blocks.accelerate(model)
    assert error(run(), unpatched) < 1e-5


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("attribute", ["mlp", "norm", "act_fn"])
def test_patched_instance(blocks, attribute, when):
    model, run = llama()
    layer = model.model.layers[0]
    module = {"mlp": layer.mlp, "norm": layer.post_attention_layernorm, "act_fn": layer.mlp.act_fn}[attribute]
    if when == "after":
        blocks.accelerate(model)
    own = module.forward
    module.forward = lambda x: own(x) * 1.5
    if when == "before":
        blocks.accelerate(model)
    actual = run()
    blocks.restore(model)
    assert error(actual, run()) < 1e-5


@pytest.mark.parametrize("lost", ["Layer", "MLP"])
def test_what_was_patched_for_a_while_is_replaced_afterwards(blocks, monkeypatch, lost):
    class Layer(modeling_llama.LlamaDecoderLayer):  # of its own, so that nothing is known about it
        pass

    class MLP(modeling_llama.LlamaMLP):
        pass

    def accelerated():
        model, _ = llama()
        layer = model.model.layers[0]
        layer.__class__, layer.mlp.__class__ = Layer, MLP
        return {cls for cls, _ in blocks.accelerate(model).replaced}

    cls = {"Layer": modeling_llama.LlamaRMSNorm, "MLP": activations.SiLUActivation}[lost]
    monkeypatch.setattr(cls, "forward", lambda self, x: x * 1.5)
    assert lost not in accelerated()
    monkeypatch.undo()
    assert lost in accelerated()


@pytest.mark.parametrize("config", [FirstBlockCacheConfig(threshold=0.0), MagCacheConfig(calibrate=True)])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["Flux.1", "Qwen-Image"])
def test_caches_of_diffusers(blocks, name, config, when):
    """They look up a block's result by its exact class."""
    case = built(small_image_models.CASES[name])
    expected = case.run()
    if when == "after":
        blocks.accelerate(case.model)
    if isinstance(config, MagCacheConfig):
        config.num_inference_steps = 4
    case.model.enable_cache(config)
    if when == "before":
        blocks.accelerate(case.model)
    with case.model.cache_context("test"):
        assert error(case.run(), expected) < 1e-5
