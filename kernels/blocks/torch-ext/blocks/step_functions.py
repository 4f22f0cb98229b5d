"""What the modules of a decoding step call in place of Torch's functions and of transformers' attention.

The products of a step have few rows, and its attention one token: the kernels of decode read weights and cached states
once, at the speed of the memory. They take the place of `torch.nn.functional.linear`, whichever module calls it, while
a step runs. transformers asks for attention functions by name, and takes new ones: in a step the model's configuration
names `attend`.

This module imports transformers: import it only for a model of transformers.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .calls import PLAIN_TENSORS
from .generation_cache import FixedCache
from .kernel_set import decode, takes

_NAME = "blocks_decoding"
_ROWS = 8  # that the kernels of decode take
_ELEMENTS = 256  # of a head, at most
_thread = threading.local()


class Linears:
    """The products of a step. Those of one input that follow each other, as of q, k and v, are computed by one kernel.

    The first step finds out which do.
    """

    def __init__(self) -> None:
        self._groups: dict[int, list[tuple[Tensor, Optional[Tensor]]]] = {}  # by id of the first weight
        self._is_known = False
        self._input: Optional[Tensor] = None  # of the last product
        self._copy: Optional[Tensor] = None
        self._first: Optional[Tensor] = None  # weight
        # By id of the weight: its bias, and the product with `_input`.
        self._ready: dict[int, tuple[Optional[Tensor], Tensor]] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        """Compute `torch.nn.functional.linear`."""
        if not _can_take(x, weight, bias):
            return F.linear(x, weight, bias)
        if not self._is_known:
            self._note(x, weight, bias)
            return decode.linear(x, weight, bias)
        if self._input is not x:
            self._ready.clear()
        ready = self._ready.pop(id(weight), None)
        if ready is not None and ready[0] is bias:
            return ready[1]
        group = self._groups.get(id(weight))
        if group is None or group[0][1] is not bias:
            return decode.linear(x, weight, bias)
        products = decode.linears(x, [weight for weight, _ in group], [bias for _, bias in group])
        self._input = x
        self._ready = {id(other[0]): (other[1], product) for other, product in zip(group[1:], products[1:])}
        return products[0]

    def end(self) -> None:
        """End a step."""
        self._groups = {key: group for key, group in self._groups.items() if len(group) > 1}
        self._is_known = True
        self._input = self._copy = self._first = None
        self._ready.clear()

    def _note(self, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> None:
        # An input that is written between two products is another input.
        if self._input is x and len(self._groups[id(self._first)]) < 3 and torch.equal(x, self._copy):
            self._groups[id(self._first)].append((weight, bias))
            return
        self._input, self._copy, self._first = x, x.clone(), weight
        # The group keeps the weights, so that no other tensor gets their ids.
        self._groups[id(weight)] = [(weight, bias)]


def _can_take(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> bool:
    return (
        takes(x)
        and 0 < x.shape[:-1].numel() <= _ROWS
        and x.shape[-1] > 0
        and all(
            type(tensor) in PLAIN_TENSORS and tensor.dtype == x.dtype and tensor.device == x.device
            for tensor in ((weight,) if bias is None else (weight, bias))
        )
    )


class _Functions(TorchFunctionMode):
    def __init__(self, linears: Linears) -> None:
        super().__init__()
        self._linears = linears

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        if function is F.linear:
            function = self._linears.linear
        return function(*args, **(kwargs or {}))


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor], **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the attention of one token. Calls from outside of a step, and unusual ones, go to transformers' own.

    Args:
        module: The attention, for transformers' own function.
        query: [batch, heads, 1, elements].
        key, value: [batch, key heads, positions, elements], as the cache gave them.
        attention_mask: [batch, 1, 1, positions], whether a position is read.
        kwargs: Other arguments of the function: `scaling`, and some that do not matter to one token.
    """
    cache: Optional[FixedCache] = getattr(_thread, "cache", None)
    new = None if cache is None else cache.take_new(key)
    if not _is_usual(query, key, value, attention_mask, kwargs):
        if new is not None:
            new.write()
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
    if new is None:
        return decode.attention(query, key, value, mask=attention_mask, scale=kwargs.get("scaling")), None
    output = decode.attention(
        query,
        key,
        value,
        mask=attention_mask,
        scale=kwargs.get("scaling"),
        new_key=new.key,
        new_value=new.value,
        position=new.slot,
    )
    return output, None


def _is_usual(query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor], kwargs: dict[str, Any]) -> bool:
    return (
        hasattr(_thread, "cache")
        and query.shape[2] == 1
        and takes(query)
        and query.dtype == key.dtype == value.dtype
        and key.shape == value.shape
        and query.shape[1] % key.shape[1] == 0
        and query.shape[3] % 8 == 0
        and query.shape[3] <= _ELEMENTS
        and (mask is None or mask.dtype == torch.bool)
        and not kwargs.get("dropout")
        and all(kwargs.get(name) is None for name in ("softcap", "position_bias", "s_aux"))
    )


def _mask(*args: Any, **kwargs: Any) -> Optional[Tensor]:
    """Make the masks of other threads, which may run the model while this one captures a step."""
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


@contextmanager
def functions_of_step(model: nn.Module, cache: FixedCache, linears: Linears) -> Iterator[None]:
    """Let the modules of `model` call the functions of this module."""
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, _mask)
    attentions = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "config")]
    configs = {id(module.config): module.config for module in attentions}
    changed = [config for config in configs.values() if getattr(config, "_attn_implementation", None) == "sdpa"]
    _thread.cache = cache
    try:
        for config in changed:
            config._attn_implementation = _NAME
        with _Functions(linears):
            yield
    finally:
        for config in changed:
            config._attn_implementation = "sdpa"
        del _thread.cache
        linears.end()
