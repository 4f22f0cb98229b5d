"""Models that the package does not name: their replacements and their accuracy."""

import copy
import functools
from pathlib import Path

import pytest
from model_cases import RecordedModel, error
from new_models import NAMES, VISION, new_model

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_device_of_the_kernels")

CODE = "".join(path.read_text() for path in Path(__file__).parents[1].glob("torch-ext/blocks/**/*.py"))
# Models without a rotary embedding that is replaced, and without a gated MLP.
NO_ROTARY = {"AuraFlow", "deepseek_v3", "glm4_moe_lite", "Lumina 2", "Mochi", "nanochat", "PRX", "Sana"} | (
    VISION.keys() - {"dinov3_vit", "pixtral"}
)
UNGATED = {
    *("apertus", "arcee", "gpt_neox", "gpt_oss", "nanochat", "nemotron", "starcoder2"),
    *("LTX-2", "Bria", "LongCat-Image", "CogView 4", "Cosmos", "Helios", "SkyReels 2"),
    *(VISION.keys() - {"aimv2_vision_model", "pixtral"}),
}
# The states of the first are not contiguous, as patches of a convolution. Cohere's norms spell LayerNorm out.
NO_NORM = {"aimv2_vision_model", "cohere", "cohere2"}

SLOW = {"Lumina 2", "Mochi"}  # 6 and 8 s of CPU time


@functools.lru_cache(maxsize=1)
def made(name, seed):
    """Return a model, a call of it, and the result in float64."""
    model, run = new_model(name, seed)
    return model, run, run(copy.deepcopy(model).double())


def is_as_right_in_bfloat16(blocks, name, seed):
    model, run, reference = made(name, seed)
    lower = copy.deepcopy(model).bfloat16()
    own = error(run(lower), reference)
    return error(run(RecordedModel(blocks, lower)), reference) <= 2 * own


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in SLOW else []) for name in NAMES]
)
def test_new_model(blocks, name):
    """Norms, gates and rotary embeddings are replaced, and results are as close to float64 as the model's own."""
    model, run, reference = made(name, 0)
    assert f'"{type(model).__module__}.' not in CODE
    faster = RecordedModel(blocks, model)
    own = error(run(model), reference)
    assert error(run(faster), reference) <= 1.3 * own
    # A router may choose other experts with some weights, and not with all.
    assert any(is_as_right_in_bfloat16(blocks, name, seed) for seed in range(3))
    does = " ".join(faster.kernels)
    assert ("norm" in does.replace("norm_rotary", "")) == (name not in NO_NORM)
    assert ("rotary" in does) == (name not in NO_ROTARY)
    assert ("glu" in does) == (name not in UNGATED)
