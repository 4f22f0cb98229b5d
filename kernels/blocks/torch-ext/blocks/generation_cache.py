"""A cache of transformers whose keys and values stay where they are, for decoding steps in CUDA graphs.

It reads the position from a tensor, so that one graph serves every position. It takes the content of the cache that
transformers filled in the prefill.

This module imports transformers: import it only for a model of transformers.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer, StaticSlidingWindowLayer


class FixedLayer(CacheLayerMixin):
    """Keys and values of one layer, [batch, heads, slots, elements]: position p is in slot p % slots.

    A layer with a sliding window has as many slots as the window has tokens, so a new token takes the place of the one
    that has just left the window, and the order of the slots does not matter to attention.
    """

    # Decides whether transformers compiles the model and makes masks for all slots.
    is_compileable = False

    def __init__(self, like: Any, slots: int, window: Optional[int], position: Tensor, slot: Tensor) -> None:
        """Have memory of the shape of the layer `like`. `slot`, [1], is that of the token in a step."""
        super().__init__()
        self.keys, self.values = (x.new_zeros((*x.shape[:2], slots, x.shape[3])) for x in (like.keys, like.values))
        self.is_initialized, self.is_sliding = True, window is not None
        self.window, self.slots, self.slot, self._position = window, slots, slot, position

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("the cache has its memory before the first step")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for memory, states in ((self.keys, key_states), (self.values, value_states)):
            memory.index_copy_(2, self.slot, states)
        return self.keys, self.values

    def take(self, layer: Any, length: int) -> None:
        """Copy the states of a layer of transformers that has cached `length` tokens."""
        kept = length if self.window is None else min(length, layer.keys.shape[2])
        slots = self.slots_of(length - kept, length)
        for memory, states in ((self.keys, layer.keys), (self.values, layer.values)):
            # Attention gives the other slots a weight of zero, and zero times NaN is NaN.
            memory.zero_().index_copy_(2, slots, states[:, :, :kept])

    def fill(self, cache: Cache, index: int, length: int) -> None:
        """Give a layer of a cache of transformers the states that it lacks of `length` tokens."""
        first = max(int(cache.get_seq_length(index)), length - self.slots)
        slots = self.slots_of(first, length)
        cache.update(self.keys.index_select(2, slots), self.values.index_select(2, slots), index)
        # It counts the given tokens, which may be the last window alone.
        if type(cache.layers[index]) is DynamicSlidingWindowLayer:
            cache.layers[index].cumulative_length = length
        elif type(cache.layers[index]) is StaticSlidingWindowLayer:
            cache.layers[index].cumulative_length_int = length

    def slots_of(self, first: int, last: int) -> Tensor:
        """Return the slots of the positions from `first` to before `last`."""
        return torch.arange(first, last, device=self._position.device) % self.slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots, 0

    def get_seq_length(self) -> Any:
        return self._position[0]

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window


class FixedCache(Cache):
    """Keys and values of all layers, and the attention masks of a step.

    Attributes:
        capacity: The number of tokens for which there is memory.
        position: [1], the position of the token that the next step computes.
        masks: By type of layer: [batch, 1, 1, slots], whether attention reads a slot.
    """

    layers: Any

    def __init__(self, windows: Sequence[Optional[int]], like: Any, capacity: int) -> None:
        """Have memory for `capacity` tokens, of the shape of another cache's."""
        self.capacity = capacity
        self.masks: dict[str, Tensor] = {}
        self._kinds: dict[str, FixedLayer] = {}  # a layer of each type, by the name that transformers has for the type
        layers = []
        with torch.inference_mode(False):  # else they could not be written outside of inference mode
            self.position = torch.zeros(1, dtype=torch.long, device=like.layers[0].keys.device)
            for window, given in zip(windows, like.layers):
                name = "full_attention" if window is None else "sliding_attention"
                slots = capacity if window is None else min(window, capacity)
                known = self._kinds.get(name)
                slot = known.slot if known else self.position if window is None else torch.zeros_like(self.position)
                layers.append(FixedLayer(given, slots, window, self.position, slot))
                if known is None:
                    self._kinds[name] = layers[-1]
                    shape = given.keys.shape[0], 1, 1, slots
                    self.masks[name] = torch.zeros(shape, dtype=torch.bool, device=self.position.device)
        super().__init__(layers=layers)

    @property
    def tensors(self) -> list[Tensor]:
        states = [x for layer in self.layers for x in (layer.keys, layer.values)]
        return [self.position, *self.masks.values(), *states]

    def copy(self, smaller: "FixedCache") -> None:
        """Copy the content of a smaller cache, of which no window has wrapped around unless it is as large here."""
        for memory, before in zip(self.tensors, smaller.tensors):
            memory[tuple(map(slice, before.shape))] = before

    def take(self, cache: Cache, attention_mask: Optional[Tensor]) -> None:
        """Copy the content of a cache of transformers with the same layers.

        Args:
            cache: The cache.
            attention_mask: [batch, tokens cached], zero for padding; None without padding.
        """
        length = int(cache.get_seq_length())
        self.position.fill_(length)
        for layer, given in zip(self.layers, cache.layers):
            layer.take(given, length)
        for name, layer in self._kinds.items():
            first = max(length - layer.slots, 0)
            is_read = True if attention_mask is None else attention_mask[:, None, None, first:length] != 0
            self.masks[name].zero_()[..., layer.slots_of(first, length)] = is_read

    def begin_step(self) -> dict[str, Tensor]:
        """Let the layers write at the position. Return the masks, which include it."""
        for name, layer in self._kinds.items():
            if layer.slot is not self.position:
                torch.remainder(self.position, layer.slots, out=layer.slot)
            self.masks[name].index_fill_(3, layer.slot, True)
        return self.masks

    def fill(self, cache: Cache, length: int) -> None:
        """Give a cache of transformers with the same layers a copy of the content that it lacks of `length` tokens."""
        for index, layer in enumerate(self.layers):
            layer.fill(cache, index, length)
