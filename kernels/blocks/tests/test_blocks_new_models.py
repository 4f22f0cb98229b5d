"""Models that the package does not name: their replacements and their accuracy."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from new_models import DIFFUSION, NAMES, TEXT, VISION, new_model
from text_models import TOKENS, logits, model_of

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_device_of_the_kernels")

PACKAGE = Path(__file__).parents[1] / "torch-ext/blocks"
# Models without a rotary embedding that a kernel computes, and without a gated MLP.
NO_ROTARY = {"AuraFlow", "PRX", "Sana"} | (VISION.keys() - {"dinov3_vit", "pixtral"})
UNGATED = {
    *(
        "apertus",
        "arcee",
        "gpt_oss",
        "starcoder2",
        "LTX-2",
        "Bria",
        "LongCat-Image",
        "CogView 4",
        "Cosmos",
        "SkyReels 2",
    ),
    *(VISION.keys() - {"aimv2_vision_model", "pixtral"}),
}


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@functools.lru_cache(maxsize=1)
def made(name, seed):
    """Return a model that no test changes, a call of it, and the result in float64."""
    model, run = new_model(name, seed)
    return model, run, run(copy.deepcopy(model).double())


def is_as_right_in_bfloat16(blocks, name, seed):
    model, run, reference = made(name, seed)
    lower = copy.deepcopy(model).bfloat16()
    own = error(run(lower), reference)
    blocks.accelerate(lower)
    return error(run(lower), reference) <= 2 * own


@pytest.mark.parametrize("name", NAMES)
def test_new_model(blocks, name):
    """Norms, gates and rotary embeddings are replaced, and results are as close to float64 as the model's own."""
    model, run, reference = made(name, 0)
    model = copy.deepcopy(model)
    own = run(model)
    report = blocks.accelerate(model)
    assert error(run(model), reference) <= 1.3 * error(own, reference)
    # A router may choose other experts with some weights, and not with all.
    assert any(is_as_right_in_bfloat16(blocks, name, seed) for seed in range(3))
    norms = [module for module in model.modules() if blocks.norms.recognized_norm(module) is not None]
    assert norms and all(blocks.replacements.replacement_in(norm) is not None for norm in norms)
    does = " ".join(words for _, words in report.replaced)
    assert ("rotary" in does) == (name not in NO_ROTARY)
    assert ("activation of the gate" in does) == (name not in UNGATED)
    assert not {words for cls, words in report.left if cls.endswith("Norm") and "layer" not in cls.lower()}
    blocks.restore(model)
    assert torch.equal(run(model), own)


def test_there_are_forty_and_the_code_names_none():
    assert len(NAMES) >= 40 and min(map(len, (TEXT, VISION, DIFFUSION))) >= 9
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    named = set()
    for name in NAMES:
        model, _ = new_model(name)
        library = type(model).__module__
        if f'"{library}.' in code:
            named.add(library)
    assert not named


def test_recognition_is_once_a_class_and_configuration(blocks, monkeypatch):
    counts, own = [0], blocks.probes.probing

    def probing():
        counts[-1] += 1
        return own()

    monkeypatch.setattr(blocks.probes, "probing", probing)
    blocks.accelerate(model_of("llama", num_hidden_layers=2, hidden_size=48))
    counts.append(0)
    report = blocks.accelerate(model_of("llama", num_hidden_layers=80, hidden_size=56))
    assert 0 < counts[1] <= counts[0]
    assert report.replaced["LlamaDecoderLayer", "residual sum with norm"] == 80


def test_recognition_changes_no_state(blocks):
    model = model_of("qwen3")
    before = {path: dict(module.__dict__) for path, module in model.named_modules()}
    random = torch.get_rng_state()
    blocks.accelerate(model)
    assert torch.equal(torch.get_rng_state(), random)
    for path, module in model.named_modules():
        assert module.__dict__.keys() == before[path].keys()
        assert all(module.__dict__[name] is value for name, value in before[path].items())


def test_captured_hidden_states_before_accelerating(blocks):
    """The hooks of transformers for these only look at outputs."""
    model = model_of("qwen3")
    expected = model(TOKENS, output_hidden_states=True).hidden_states
    report = blocks.accelerate(model)
    assert not report.left and report.replaced["Qwen3DecoderLayer", "residual sum with norm"] == 2
    actual = model(TOKENS, output_hidden_states=True).hidden_states
    assert len(actual) == len(expected)
    assert all(error(mine, own.double()) < 1e-5 for mine, own in zip(actual, expected))
    assert logits(model).isfinite().all()
