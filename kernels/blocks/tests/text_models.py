"""Small random text models of transformers, and helpers of their tests."""

import json
from collections import Counter
from pathlib import Path

import torch
import transformers
from model_cases import DEVICE, randomized
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

# Configurations and their options. The windows are narrower than the tests' sequences. Gemma's second layer has none.
TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
SIZES, CONFIGS, IMAGE_TEXT = TABLE["sizes"], TABLE["models"], TABLE["image-text"]
TOKENS = torch.arange(3, 27, device=DEVICE).view(2, 12)
PADDED = torch.ones_like(TOKENS)
PADDED[0, :4] = 0


def model_of(name, seed=0, attention=None, **changes):
    config_class, options = CONFIGS[name]
    config = getattr(transformers, config_class)(**{**SIZES, **options, **changes})
    torch.manual_seed(seed)
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation=attention), 0.2)


def lively(name="llama", **changes):
    """Return a small model whose tokens do not repeat themselves."""
    return _enlivened(model_of(name, **{"max_position_embeddings": 512, **changes}))


@torch.no_grad()
def _enlivened(model):
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)
    return model.eval().requires_grad_(False)


def image_text_model(name):
    """Return a small model, and the arguments of `generate` with an image."""
    given = IMAGE_TEXT[name]
    text = {**SIZES, "vocab_size": 120, **given["text"]}
    config = AutoConfig.for_model(name, **given["config"], text_config=text, image_token_id=110, image_token_index=110)
    torch.manual_seed(0)
    inputs = {name: torch.tensor(value) for name, value in given["inputs"].items()}
    inputs |= {"pixel_values": torch.randn(given["pixels"]), "prompt": torch.tensor([[5, 111, *[110] * 4, 112, 9]])}
    return _enlivened(AutoModelForImageTextToText.from_config(config)), inputs


@torch.no_grad()
def logits(model, **inputs):
    tokens, padded = TOKENS.to(model.device), PADDED.to(model.device)
    return model(tokens, **{"attention_mask": padded, "use_cache": False, **inputs}).logits[padded.bool()]


class OurOps(TorchDispatchMode):
    """Counts the ops of some packages."""

    def __init__(self, *packages):
        super().__init__()
        self.packages, self.ops = packages, Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(package in op.namespace for package in self.packages):
            self.ops[op.overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))
