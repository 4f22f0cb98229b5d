"""The layers of the package, put into models by transformers' own ways."""

import os
import sys
from pathlib import Path

import kernels
import pytest
import torch
import transformers
from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from model_cases import RecordedModel, error
from text_models import CONFIGS, logits, model_of, ops_of
from transformers import KernelConfig
from transformers.utils import kernel_config
from transformers.utils.import_utils import is_kernels_available

PROJECT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("kernels_of_the_cpu")
KERNELS = ("adaln", "blocks", "decode", "geglu", "loss", "rmsnorm", "rope3d")
# By the layer's name in transformers, where the MLPs have none before `replace_kernel_forward_from_hub`.
LLAMA = {"RMSNorm": "LlamaRMSNorm", "rotary_pos_emb": "RotaryPosEmb", "MLP": "GatedMLP"}
LAYERS = {
    "gemma2": {"RMSNorm": "GemmaRMSNorm", "rotary_pos_emb": "RotaryPosEmb", "MLP": "GatedMLP"},
    "llama": LLAMA,
    "olmo2": {**LLAMA, "RMSNorm": "Olmo2RMSNorm"},
    "phi3": {"RMSNorm": "LlamaRMSNorm", "MLP": "Phi3MLP"},
    "qwen3": LLAMA,
}
NEEDS_KERNELS = pytest.mark.skipif(
    not is_kernels_available(),
    reason=f"transformers {transformers.__version__} refuses kernels {kernels.__version__}",
)


@pytest.fixture(autouse=True)
def built_packages(monkeypatch, owner):
    paths = [f"{owner}/{name}={PROJECT.parent / name}" for name in KERNELS]
    given = os.environ.get("LOCAL_KERNELS")
    monkeypatch.setenv("LOCAL_KERNELS", ":".join([*paths, given] if given else paths))


@pytest.fixture(autouse=True)
def own_mapping():
    """Keep a test's registrations from other tests."""
    with use_kernel_mapping({}):
        yield


@pytest.fixture
def named(monkeypatch):
    """Return a function that gives the norms and MLPs of a model layer names, and undoes the changes of kernelizing."""

    def name_layers(name):
        library = sys.modules[type(model_of(name)).__module__]
        prefix = type(model_of(name)).__name__.removesuffix("ForCausalLM")
        for layer in ("RMSNorm", "MLP"):
            cls = getattr(library, prefix + layer)
            monkeypatch.setattr(cls, "kernel_layer_name", None, raising=False)
            monkeypatch.setattr(cls, "kernel_condition", None, raising=False)
            replace_kernel_forward_from_hub(cls, layer)
        # Kernelizing a model changes this function for all models of the library's module.
        rotary = library.apply_rotary_pos_emb
        if isinstance(rotary, torch.nn.Module):
            monkeypatch.setitem(rotary.__dict__, "forward", rotary.forward)

    return name_layers


def repositories(name):
    return {layer: {"cpu": LocalLayerRepository(PROJECT, layer_name=ours)} for layer, ours in LAYERS[name].items()}


@pytest.mark.parametrize("name", sorted(LAYERS))
@pytest.mark.parametrize("mode", [Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE])
def test_kernelize(blocks, named, name, mode):
    named(name)
    model = model_of(name)
    expected = logits(model)
    with use_kernel_mapping(repositories(name)):
        kernelize(model, mode=mode, device="cpu")
    rotary = {"rotate_tokens"} if is_kernels_available() and name != "phi3" else set()
    assert ops_of(model) == {"rms_norm", "geglu_halves" if name == "phi3" else "geglu_pair"} | rotary
    assert error(logits(model), expected) < 1e-5


def of_local_layers(model, owner):
    paths = {layer: f"{PROJECT}:{ours}" for layer, ours in LLAMA.items()}
    model.set_use_kernels(True, KernelConfig(paths, use_local_kernel=True))
    return model


def of_a_repository(model, owner):
    repository = {"revision": "main"}  # a version would be looked up on the Hub
    layers = {layer: (f"{owner}/blocks:{ours}", repository) for layer, ours in LLAMA.items()}
    return type(model).from_pretrained(model.saved, use_kernels=True, kernel_config=KernelConfig(layers))


def of_a_mapping(model, owner):
    with use_kernel_mapping(repositories("llama")):
        return type(model).from_pretrained(model.saved, use_kernels=True)


@NEEDS_KERNELS
@pytest.mark.parametrize("use", [of_local_layers, of_a_repository, of_a_mapping])
def test_use_kernels(blocks, named, monkeypatch, tmp_path, owner, use):
    """Lets a KernelConfig take the CPU, which it refuses, to run its GPU path."""
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", ["cpu"])
    named("llama")
    model = model_of("llama")
    expected = logits(model)
    model.saved = tmp_path
    model.save_pretrained(tmp_path)
    faster = use(model, owner)
    assert ops_of(faster) == {"rms_norm", "geglu_pair", "rotate_tokens"}
    assert error(logits(faster), expected) < 1e-5


def test_recorded_after_kernelize(blocks, named):
    named("qwen3")
    model = model_of("qwen3")
    expected = logits(model)
    with use_kernel_mapping(repositories("qwen3")):
        kernelize(model, mode=Mode.INFERENCE, device="cpu")
    faster = RecordedModel(blocks, model)
    assert error(logits(faster), expected) < 1e-5
    assert not {"rms_norm", "swiglu_pair"} & faster.kernels.keys()  # the layers call them


def test_layers_are_for_every_model(blocks):
    assert set(LAYERS) <= set(CONFIGS)
    assert {ours for layers in LAYERS.values() for ours in layers.values()} == set(blocks.layers.__all__)
