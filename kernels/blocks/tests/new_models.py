"""Small random models whose classes the package names nowhere, each with a call of it."""

import json
from pathlib import Path

import torch
from model_cases import randomized
from small_models import IMAGE, VIDEO, case, mask, random
from text_models import SIZES, TOKENS
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

# Classes' keys by their model types. `experts` are those of all text models, which ignore keys of others.
CONFIGS = json.loads(Path(__file__).with_name("new_models.json").read_text())
TEXT, VISION, DIFFUSION = (CONFIGS[kind] for kind in ("text", "vision", "diffusion"))


def _text(name):
    config = AutoConfig.for_model(name, **{**SIZES, **CONFIGS["experts"], **TEXT[name]})
    # The default needs experts whose sizes are multiples of 16 bytes, and knows no float64. transformers 4 has none.
    experts = {"experts_implementation": "eager"} if hasattr(PreTrainedModel, "set_experts_implementation") else {}
    model = AutoModelForCausalLM.from_config(config, **experts)
    return model, lambda model: model(TOKENS, use_cache=False).logits


def _vision(name):
    model = AutoModel.from_config(AutoConfig.for_model(name, **{**CONFIGS["sizes-of-vision"], **VISION[name]}))
    pixels = torch.randn(2, 3, 32, 32)
    return model, lambda model: model(pixels.to(model.dtype)).last_hidden_state


STATES = {"image": IMAGE, "video": VIDEO, "tokens": (24, 8), "frames": (48, 8)}
INPUTS = {
    "normal": random,
    "samples": lambda *shape: list(random(*shape)),
    "uniform": lambda *shape: torch.rand(shape),
    "filled": torch.full,
    "mask": lambda: mask(torch.bool),
}


def _diffusion(name):
    given = {"class": f"{name.replace('-', '')}Transformer2DModel", "inputs": {}, "options": {}, **DIFFUSION[name]}
    lists = {key: value for key, value in given["inputs"].items() if isinstance(value, list)}
    inputs = given["inputs"] | {key: INPUTS[kind](*sizes) for key, (kind, *sizes) in lists.items()}
    made = case(given["class"], STATES[given["states"]], inputs, **given["options"])

    def run(model):
        output = model(**made.inputs_in(model.dtype))[0]
        return torch.cat([part.flatten() for part in output]) if isinstance(output, list) else output

    return made.model, run


NAMES = [*TEXT, *VISION, *DIFFUSION]


def new_model(name, seed=0):
    """Return a model of float32 and a function that returns the outputs of a model like it."""
    torch.manual_seed(seed)
    model, run = (_text if name in TEXT else _vision if name in VISION else _diffusion)(name)
    return randomized(model, 0.2), torch.no_grad()(run)
