"""Text models of transformers in CUDA graphs: causal attention without a mask, as outside of graphs.

Without a mask, position ids and a cache, every sequence is one text from its start, and its attention is causal. The
attention function computes that without a mask, which is faster. transformers makes sure by reading the position ids
that the model has just made, which a capture does not allow, so it makes a mask there. The models are known by name:
whether their masks are only causal depends on their configuration, which a probe cannot vary.
"""

from typing import Any, Optional

from torch import Tensor, nn

from .. import kernel_set
from ..replacements import replaces

# From release 5.24 on, a cache is the argument `cache`. Before, `cache` was among the other arguments, with another
# meaning: the pages of continuous batching.
RENAMED = {"past_key_values": "cache"}


def _mismatch(model: nn.Module) -> Optional[str]:
    if not set(model.config.layer_types) <= {"full_attention", "sliding_attention"}:
        return "it has layers other than attention"
    _ = model.config.use_cache, model.config._attn_implementation, model.config.sliding_window
    return None


def _is_plainly_causal(model: nn.Module, tokens: int) -> bool:
    """Return whether the mask of a sequence from its start is causal, and left to the attention function."""
    config = model.config
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return False
    fits = "sliding_attention" not in config.layer_types or tokens < config.sliding_window
    return config._attn_implementation == "sdpa" and fits


# These take a mask for each type of their layers, as `generate` makes them.
@replaces(
    "transformers.models.gemma3.modeling_gemma3.Gemma3TextModel",
    "transformers.models.qwen2.modeling_qwen2.Qwen2Model",
    "transformers.models.qwen3.modeling_qwen3.Qwen3Model",
    does="causal attention without a mask in CUDA graphs",
    kernels=(),
    mismatch=_mismatch,
    renamed=RENAMED,
)
class CausalModel:
    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Any = None,
        position_ids: Optional[Tensor] = None,
        past_key_values: Any = None,
        inputs_embeds: Optional[Tensor] = None,
        use_cache: Optional[bool] = None,
        **kwargs: Any,
    ) -> Any:
        makes_cache = self.config.use_cache if use_cache is None else use_cache
        is_plain = attention_mask is None and position_ids is None and past_key_values is None and not makes_cache
        if is_plain and kernel_set.is_capturing():
            tokens = (inputs_embeds if input_ids is None else input_ids).shape[1]
            if _is_plainly_causal(self, tokens):
                attention_mask = dict.fromkeys(self.config.layer_types)
        return super().forward(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,  # by name: the library's decorators look for it there
            **kwargs,
        )
