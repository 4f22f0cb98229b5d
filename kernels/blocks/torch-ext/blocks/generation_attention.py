"""Attention of one token over the heads of a cache, and what else the modules of a decoding step call.

transformers asks for attention functions by name, and takes new ones. In a step the model's configuration names
`attend`, which reads grouped keys and values where they are; some releases copy them for every head of q.

This module imports transformers: import it only for a model of transformers.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "blocks_decoding"
_thread = threading.local()

# What the modules of a step call in place of functions of Torch, by the function. A product of few rows belongs here,
# as `torch.nn.functional.linear`: whichever module calls it, it is looked up here.
FUNCTIONS: dict[Callable, Callable] = {}


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        return FUNCTIONS.get(function, function)(*args, **(kwargs or {}))


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor], **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the attention of one token. Calls from outside of a step, and unusual ones, go to transformers' own.

    Args:
        module: The attention, for transformers' own function.
        query: [batch, heads, 1, elements].
        key, value: [batch, key heads, positions, elements].
        attention_mask: [batch, 1, 1, positions], added to the products of q and k.
        kwargs: Other arguments of the function: `scaling`, and some that do not matter to one token.
    """
    unusual = [name for name in ("softcap", "position_bias", "s_aux") if kwargs.get(name) is not None]
    if not hasattr(_thread, "active") or query.shape[2] != 1 or kwargs.get("dropout") or unusual:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
    batch, heads, _, elements = query.shape
    # The heads of q that share a head of k are rows of one product.
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], elements)
    output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return output.reshape(batch, 1, heads, value.shape[-1]), None


def _mask(*args: Any, **kwargs: Any) -> Optional[Tensor]:
    """Make the masks of other threads, which may run the model while this one captures a step."""
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


@contextmanager
def functions_of_step(model: nn.Module) -> Iterator[None]:
    """Let the modules of `model` call the functions of this module."""
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, _mask)
    configs = {
        id(module.config): module.config
        for module in model.modules()
        if hasattr(module, "layer_idx")
        and getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa"
    }
    _thread.active = True
    try:
        for config in configs.values():
            config._attn_implementation = _NAME
        with _Functions():
            yield
    finally:
        for config in configs.values():
            config._attn_implementation = "sdpa"
        del _thread.active
