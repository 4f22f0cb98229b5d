"""A cache of transformers whose keys and values stay where they are, for decoding steps in CUDA graphs.

Outside of a step it counts in Python and returns the tensors of a `DynamicCache`: the prefill computes the same,
with the same kernels. Inside a step it reads the position from a tensor, so that one graph serves every position.

This module imports transformers: import it only for a model of transformers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .calls import Refused


def windows_of(cache: Cache, config: Any, batch: int, length: int) -> tuple[Optional[int], ...]:
    """Return the sliding window of each layer of a cache of transformers, or None for a layer that keeps all tokens.

    Args:
        cache: The cache.
        config: That of the language model.
        batch: The number of sequences.
        length: How many tokens have to be cached.

    Raises:
        Refused: If a layer keeps something else, or has no room.
    """
    if type(cache) not in (DynamicCache, StaticCache):
        raise Refused(f"its cache is a {type(cache).__name__}")
    if cache.offloading:
        raise Refused("its cache is offloaded")
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer):
            raise Refused(f"its cache has a {type(layer).__name__}")
        if getattr(layer, "record_past", False):
            raise Refused("its cache keeps tokens outside of a sliding window")
        if layer.is_initialized and layer.keys.shape[0] != batch:
            raise Refused("its cache is for another number of sequences")
        if type(layer) is StaticLayer and layer.max_cache_len < length:
            raise Refused("its cache is too small")
    # A static layer does not know its window if it has less room, and a dynamic cache may have no layers yet.
    layers = DynamicCache(config=config).layers
    windows = tuple(int(layer.sliding_window) if layer.is_sliding else None for layer in layers)
    kinds = [layer.is_sliding for layer in cache.layers] or [False] * len(layers)
    if not layers or kinds != [layer.is_sliding for layer in layers]:
        raise Refused("its cache has other layers than a new one of its model")
    if len({window for window in windows if window is not None}) > 1:
        raise Refused("its layers have different sliding windows")
    return windows


@dataclass(frozen=True)
class NewStates:
    """Key and value of the token of a step, which attention has yet to write.

    Attributes:
        keys, values: The memory, as the layer gave it to attention.
        key, value: [batch, heads, 1, elements].
        slot: [1], where they belong.
    """

    keys: Tensor
    values: Tensor
    key: Tensor
    value: Tensor
    slot: Tensor

    def write(self) -> None:
        self.keys.index_copy_(2, self.slot, self.key)
        self.values.index_copy_(2, self.slot, self.value)


class _Shared:
    """The common state of all layers of a cache.

    Attributes:
        capacity: The number of tokens for which there is memory.
        position: [1], the position of the token that the next step computes.
        bucket: In a step: how many positions attention reads. None outside.
        slots: By the number of slots of a layer: [1], the slot of the token in a step.
        is_read: Whether attention asks each layer of a step for its pending tensors. The first forward determines it.
        new: The last layer's pending tensors, or those that it has written in that forward.
        unread: Layers that attention did not ask.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.bucket: Optional[int] = None
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.slots: dict[int, Tensor] = {}
        self.is_read: Optional[bool] = None
        self.new: Optional[NewStates] = None
        self.unread = 0


class FixedLayer(CacheLayerMixin):
    """Keys and values of one layer, [batch, heads, slots, elements]: position p is in slot p % slots.

    A layer with a sliding window has as many slots as the window has tokens, so a new token takes the place of the one
    that has just left the window, and the order of the slots does not matter to attention.
    """

    # Decides whether transformers compiles the model and makes masks for all slots.
    is_compileable = False

    def __init__(self, shared: _Shared, window: Optional[int]) -> None:
        super().__init__()
        self._shared = shared
        self._window = window
        self.is_sliding = window is not None
        self.length = 0  # tokens cached, outside of a step

    @property
    def slots(self) -> int:
        capacity = self._shared.capacity
        return capacity if self._window is None else min(self._window, capacity)

    @property
    def bytes(self) -> int:
        held: list[Any] = [self.keys, self.values] if self.is_initialized else []
        return sum(tensor.nbytes for tensor in held)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        # Tensors that are made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self.keys, self.values = (
                torch.zeros((*states.shape[:2], self.slots, states.shape[3]), dtype=states.dtype, device=states.device)
                for states in (key_states, value_states)
            )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._shared.bucket is None:
            start, self.length = self.length, self.length + key_states.shape[2]
            return self._append(self.keys, key_states, start), self._append(self.values, value_states, start)
        shared, end = self._shared, min(self._shared.bucket, self.slots)
        keys, values = self.keys[:, :, :end], self.values[:, :, :end]
        shared.unread += shared.new is not None
        shared.new = NewStates(keys, values, key_states, value_states, shared.slots[self.slots])
        if not shared.is_read:
            shared.new.write()
        return keys, values

    def _append(self, memory: Tensor, states: Tensor, start: int) -> Tensor:
        """Write the states of the positions from `start` on, and return all states that their attention needs."""
        end = start + states.shape[2]
        if self._window is None:
            memory[:, :, start:end] = states
            return memory[:, :, :end]
        past = min(start, self._window - 1)
        needed = states if past == 0 else torch.cat([*_pieces(memory, start - past, start), states], 2)
        kept = min(states.shape[2], self.slots)
        written = states[:, :, states.shape[2] - kept :].split(
            [piece.shape[2] for piece in _pieces(memory, end - kept, end)], 2
        )
        for piece, part in zip(_pieces(memory, end - kept, end), written):
            piece.copy_(part)
        return needed

    def take(self, layer: CacheLayerMixin, length: int) -> None:
        """Copy the states of a layer of transformers that has cached `length` tokens."""
        kept = length if self._window is None else min(length, layer.keys.shape[2])
        self.length = length - kept
        self.update(layer.keys[:, :, :kept], layer.values[:, :, :kept])

    def states_since(self, first: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of the tokens from `first` on, of those that are still here."""
        kept = min(self.length - first, self.slots)
        keys, values = (
            torch.cat(_pieces(memory, self.length - kept, self.length), 2) for memory in (self.keys, self.values)
        )
        return keys, values

    def grow(self, slots: int) -> None:
        """Move to larger memory. Called after the shared capacity has grown, with the old number of slots."""
        if self.is_initialized and self.slots != slots:
            old: tuple[Any, Any] = self.keys, self.values
            self.lazy_initialization(*old)
            for memory, states in zip((self.keys, self.values), old):
                memory[:, :, :slots] = states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._shared.bucket is not None:
            return min(self._shared.bucket, self.slots), 0
        past = self.length if self._window is None else min(self.length, self._window - 1)
        return past + query_length, self.length - past

    def get_seq_length(self) -> Any:
        return self.length if self._shared.bucket is None else self._shared.position[0]

    def get_max_length(self) -> int:
        return -1 if self._window is None else self._window

    def reset(self) -> None:
        self.length = 0
        if self.is_initialized:
            # Attention gives these slots a weight of zero, and zero times NaN is NaN.
            self.keys.zero_()
            self.values.zero_()


def _pieces(memory: Tensor, first: int, last: int) -> list[Tensor]:
    """Return the slots of the positions from `first` to before `last`, in order: one view, or two around the end."""
    slots = memory.shape[2]
    start, count = first % slots, last - first
    if start + count <= slots:
        return [memory[:, :, start : start + count]]
    return [memory[:, :, start:], memory[:, :, : start + count - slots]]


class FixedCache(Cache):
    """Keys and values of all layers, and the attention masks of a step."""

    def __init__(self, windows: Sequence[Optional[int]], capacity: int, device: torch.device) -> None:
        self._shared = _Shared(capacity, device)
        super().__init__(layers=[FixedLayer(self._shared, window) for window in windows])
        self._masks: dict[int, Tensor] = {}

    @property
    def capacity(self) -> int:
        return self._shared.capacity

    @property
    def position(self) -> Tensor:
        return self._shared.position

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers) + sum(mask.nbytes for mask in self._masks.values())

    def grow(self, capacity: int) -> None:
        """Move to larger memory. Graphs of the old memory must not run again."""
        slots = [layer.slots for layer in self.layers]
        self._shared.capacity = capacity
        for layer, before in zip(self.layers, slots):
            layer.grow(before)
        masks, self._masks = self._masks, {}
        self._make_masks()
        # Only a window that stays as it is can have wrapped around.
        for before, now in {(before, layer.slots) for layer, before in zip(self.layers, slots)}:
            self._masks[now][..., :before] = masks[before]

    def begin(self, attention_mask: Optional[Tensor]) -> None:
        """Prepare for steps after the prefill.

        Args:
            attention_mask: [batch, tokens cached], zero for padding; None without padding.
        """
        self._make_masks()
        length = self.layers[0].length
        self._shared.position.fill_(length)
        for slots, mask in self._masks.items():
            mask.zero_()
            kept = min(length, slots)
            pieces = _pieces(mask.transpose(2, 3), length - kept, length)
            for piece in pieces:
                piece.fill_(True)
            if attention_mask is not None:
                padded = attention_mask[:, None, length - kept : length, None] == 0
                for piece, part in zip(pieces, padded.split([piece.shape[2] for piece in pieces], 2)):
                    piece.masked_fill_(part, False)

    @contextmanager
    def step(self, bucket: int) -> Iterator[dict[str, Tensor]]:
        """Run one step: the layers write at the position, and attention reads the first `bucket` positions.

        Yields:
            The masks of the step by type of layer: [batch, 1, 1, slots], whether attention reads a slot.
        """
        shared = self._shared
        for slots, mask in self._masks.items():
            if slots == shared.capacity:
                shared.slots[slots] = shared.position
            else:
                torch.remainder(shared.position, slots, out=shared.slots[slots])
            mask.index_fill_(3, shared.slots[slots], True)
        shared.bucket, shared.unread = bucket, 0
        try:
            kinds = {layer.is_sliding: layer.slots for layer in self.layers}
            names = {False: "full_attention", True: "sliding_attention"}
            yield {names[kind]: self._masks[slots][..., : min(bucket, slots)] for kind, slots in kinds.items()}
        finally:
            shared.bucket = None
            shared.unread += shared.new is not None
            shared.new = None
        if shared.is_read and shared.unread:
            raise Refused("its attention does not read the cache at once")
        if shared.is_read is None:
            shared.is_read = not shared.unread

    def advance(self) -> None:
        """Let the next step be that of the next position."""
        self._shared.position.add_(1)

    def take_new(self, keys: Tensor) -> Optional[NewStates]:
        """Return the tensors that attention over `keys` has yet to write into the layer, or None."""
        new, is_read = self._shared.new, self._shared.is_read
        if new is None or new.keys is not keys:
            return None
        self._shared.new = None
        return new if is_read else None

    def end(self, length: int) -> None:
        """Count the tokens of the steps in Python, too."""
        for layer in self.layers:
            layer.length = length

    def take(self, cache: Cache) -> None:
        """Copy the content of a cache of transformers with the same layers."""
        length = int(cache.get_seq_length())
        if length:
            for layer, given in zip(self.layers, cache.layers):
                layer.take(given, length)

    def fill(self, cache: Cache) -> None:
        """Give a cache of transformers with the same layers a copy of the content that it lacks."""
        length = int(cache.get_seq_length())
        for index, layer in enumerate(self.layers):
            cache.update(*layer.states_since(length), index)
            given = cache.layers[index]
            # It counts the given tokens, which may be the last window alone.
            if type(given) is DynamicSlidingWindowLayer:
                given.cumulative_length = layer.length
            elif type(given) is StaticSlidingWindowLayer:
                given.cumulative_length_int = layer.length

    def _make_masks(self) -> None:
        keys = self.layers[0].keys
        with torch.inference_mode(False):
            for slots in {layer.slots for layer in self.layers} - self._masks.keys():
                shape = keys.shape[0], 1, 1, slots
                self._masks[slots] = torch.zeros(shape, dtype=torch.bool, device=keys.device)
                self._shared.slots[slots] = torch.zeros_like(self._shared.position)
