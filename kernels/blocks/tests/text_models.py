"""Small random text models of transformers, and helpers of their tests."""

from collections import Counter

import torch
import transformers
from model_cases import DEVICE, randomized
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The windows are narrower than the sequences of the tests. Gemma's second layer has none.
WINDOW = {"sliding_window": 8}
GEMMA = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
CONFIGS = {
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "llama": ("LlamaConfig", {"mlp_bias": True, "attention_bias": True}),
    "mistral": ("MistralConfig", WINDOW),
    "olmo2": ("Olmo2Config", {}),
    "phi3": ("Phi3Config", {**WINDOW, "rope_parameters": HALF_ROTARY}),
    "qwen2": ("Qwen2Config", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
}
TOKENS = torch.arange(3, 27, device=DEVICE).view(2, 12)
PADDED = torch.ones_like(TOKENS)
PADDED[0, :4] = 0


def model_of(name, seed=0, attention=None, **changes):
    config_class, options = CONFIGS[name]
    config = getattr(transformers, config_class)(**{**SIZES, **options, **changes})
    torch.manual_seed(seed)
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation=attention), 0.2)


@torch.no_grad()
def lively(name="llama", **changes):
    """Return a small model whose tokens do not repeat themselves."""
    model = model_of(name, **{"max_position_embeddings": 512, **changes})
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)
    return model.requires_grad_(False)


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
