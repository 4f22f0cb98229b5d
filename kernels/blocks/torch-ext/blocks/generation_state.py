"""The memory of decoding steps in CUDA graphs: a cache that stays where it is, tokens, and one step."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .generation_call import IS_4, GenerateCall

_REPLAYABLE = 24  # graphs of one state, by the processors of their calls and the sizes of prompts
_KINDS = {False: "full_attention", True: "sliding_attention"}  # transformers' names, by whether there is a window


class FixedLayer(DynamicLayer):
    """Keys and values of one layer, [batch, heads, capacity, elements], by position. Masks leave out old tokens."""

    @torch.inference_mode(False)  # else the memory could not be written outside of inference mode
    def __init__(self, like: Any, capacity: int, position: Tensor) -> None:
        super().__init__()
        self.keys, self.values = (x.new_zeros((*x.shape[:2], capacity, x.shape[3])) for x in (like.keys, like.values))
        self.is_initialized, self._position = True, position

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for memory, states in ((self.keys, key_states), (self.values, value_states)):
            memory.index_copy_(2, self._position, states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        return self._position[0]


class FixedCache(Cache):
    """Keys and values of all layers, which it has from the prompt on. One graph serves every position, a tensor."""

    layers: Any

    def __init__(self, windows: Sequence[Optional[int]], batch: int, capacity: int, position: Tensor) -> None:
        self.capacity = capacity
        self.position = position  # [1], of the token that the next step computes
        # [batch, 1, 1, capacity], whether a token is there, and is no padding.
        self.mask = position.new_zeros((batch, 1, 1, capacity), dtype=torch.bool)
        self.positions = torch.arange(capacity, device=position.device)
        self._windows = {_KINDS[window is not None]: window for window in windows}
        super().__init__(layers=[])

    def take(self, cache: Cache) -> None:
        """Copy the keys and values of a cache of transformers with the same layers."""
        length = int(cache.get_seq_length())
        self.layers = self.layers or [FixedLayer(layer, self.capacity, self.position) for layer in cache.layers]
        for own, given in zip(self.layers, cache.layers):
            kept = min(length, given.keys.shape[2])  # of a sliding window
            for memory, states in ((own.keys, given.keys), (own.values, given.values)):
                # Attention gives the others a weight of zero, and zero times NaN is NaN.
                memory.zero_()[:, :, length - kept : length] = states[:, :, :kept]

    def begin_step(self) -> dict[str, Tensor]:
        """Return the masks of the token at the position, by type of layer."""
        self.mask.index_fill_(3, self.position, True)
        return {
            name: self.mask if window is None else self.mask & (self.positions > self.position - window)
            for name, window in self._windows.items()
        }

    def fill(self, cache: Cache, length: int) -> None:
        """Give a cache of transformers with the same layers the states that it lacks of `length` tokens."""
        for index, layer in enumerate(self.layers):
            first = int(cache.get_seq_length(index))
            positions = {"cache_position": self.positions[first:length]}  # which releases before 5 read
            cache.update(layer.keys[:, :, first:length], layer.values[:, :, first:length], index, positions)


class State:
    """The memory of the sequences of one call, and the graphs of steps on it."""

    @torch.inference_mode(False)
    def __init__(self, kind: tuple, call: GenerateCall, capacity: int, wait: Callable[[], None]) -> None:
        """Allocate memory for `capacity` tokens. `wait` returns when the GPU has finished all graphs."""
        self.kind, self._wait = kind, wait  # kind: the number of sequences, and what else its calls share
        last = None if call.position_ids is None else call.position_ids[..., -1:]
        # The position in the cache, the number of tokens, and position ids: each step adds one to all.
        self._counters = call.input_ids.new_zeros(2 + (0 if last is None else last.numel()), dtype=torch.long)
        self.length = self._counters[1:2]
        self.position_ids = None if last is None else self._counters[2:].view(last.shape)
        self.cache = FixedCache(call.windows, kind[0], capacity, self._counters[:1])
        # Replays by the key of a call, and owners of inputs.
        self.graphs: OrderedDict[Any, tuple[Callable[[], None], Any]] = OrderedDict()
        self.logits: Optional[Tensor] = None  # [batch, vocabulary] in float32, if tokens are chosen outside of a step
        self.prompts: set[Any] = set()  # that were computed without a graph, by its key
        self.ids = self.length.new_zeros(kind[0], capacity + 1)  # tokens: those after `length` repeat one
        self.news = self.length.new_zeros(2, kind[0])  # the new tokens, and whether their sequences continue
        self.token = self.news[0, :, None]  # the last one, [batch, 1]
        self.unfinished = self.length.new_ones(kind[0], dtype=torch.bool)

    @property
    def bytes(self) -> int:
        cached = (x for layer in self.cache.layers for x in (layer.keys, layer.values))
        return sum(x.nbytes for x in (*cached, self.cache.mask, self.ids, self.logits) if x is not None)

    @torch.inference_mode(False)
    def begin(self, call: GenerateCall, tokens: Tensor) -> None:
        """Prepare for steps after `tokens`: the call's, or these and a new one, before which the call's cache ends."""
        is_prompt = tokens is call.input_ids
        length = tokens.shape[1] - 1 if is_prompt else int(call.cache.get_seq_length())
        mask = None if is_prompt else call.kwargs.get("attention_mask")  # zero for padding
        self.cache.position.fill_(length)
        self.cache.mask.zero_()[..., :length] = True if mask is None else mask[:, None, None, :length] != 0
        if not is_prompt:
            self.cache.take(call.cache)
        self.ids.copy_(tokens[:, -1:].expand_as(self.ids))
        self.ids[:, : tokens.shape[1]] = tokens
        self.length.fill_(tokens.shape[1])
        self.token.copy_(tokens[:, -1:])
        self.unfinished.fill_(True)
        if self.position_ids is not None:
            self.position_ids.copy_(call.position_ids[..., -1:] + (not is_prompt))

    @torch.inference_mode(False)
    def resize(self, call: GenerateCall, capacity: int) -> None:
        """Make room for more tokens, without the graphs."""
        if capacity <= self.cache.capacity:
            return
        self._wait()
        self.graphs.clear()
        before = self.cache
        self.cache = FixedCache(call.windows, self.kind[0], capacity, before.position)
        self.cache.mask[..., : before.capacity] = before.mask
        self.cache.take(before)
        more = self.ids[:, -1:].expand(-1, capacity + 1 - self.ids.shape[1])  # the first new token, or a later one
        self.ids = torch.cat((self.ids, more), 1)

    def remember(self, key: Any, call: GenerateCall, replay: Callable[[], None]) -> None:
        self.graphs[key] = replay, (call.processors, call.eos, call.pad, call.options)
        if len(self.graphs) > _REPLAYABLE:
            self._wait()
            self.graphs.popitem(last=False)

    def compute(self, model: Any, call: GenerateCall, prompt: int, forward: Callable[..., Any]) -> Tensor:
        """Return the logits, [batch, vocabulary], of the token after the present one, which is cached; repeatable."""
        masks = self.cache.begin_step()  # of `prompt` tokens, they leave out those that padding fills
        ids, cache, positions, options = self.token, self.cache, self.position_ids, {**call.options}
        if prompt:
            ids, cache, options["logits_to_keep"] = self.ids[:, :prompt], DynamicCache(), self.length - 1
            if positions is not None:
                positions = self.cache.positions[:prompt].expand(*positions.shape[:-1], -1)
        else:
            if model.config.get_text_config(decoder=True)._attn_implementation == "eager":  # it adds masks to products
                dtype = self.cache.layers[0].keys.dtype
                masks = {name: torch.where(mask, 0.0, -torch.inf).to(dtype) for name, mask in masks.items()}
            options["attention_mask"] = masks if call.takes_masks_by_type else next(iter(masks.values()))
        if positions is not None:
            options["position_ids"] = positions
        options |= {"use_cache": True, call.cache_name: cache}
        options |= {"cache_position": self.cache.position} if IS_4 else {}
        inputs = {"input_ids": ids, **options} if IS_4 else model.prepare_inputs_for_generation(ids, **options)
        logits = forward(**inputs, return_dict=True).logits[:, -1]
        if prompt:
            self.cache.take(cache)
        return logits

    def changes_with_padding(self, logits: Tensor, compute: Callable[[], Tensor], call: GenerateCall) -> bool:
        """Return whether the logits of a prompt depend on the tokens after it."""
        padding = self.ids[:, call.input_ids.shape[1] :]
        padding.copy_((self.token == 0).expand_as(padding))
        is_same = torch.equal(compute(), logits)
        padding.copy_(self.token.expand_as(padding))
        return not is_same

    def finish(self, call: GenerateCall, logits: Tensor) -> None:
        """Choose a token by its logits, and find out which sequences end; or keep the logits."""
        if call.by_hand is None:
            self.choose(logits, call, self.ids, {})
            self.end(call)
            return
        if self.logits is None or self.logits.shape != logits.shape:
            with torch.inference_mode(False):
                self.logits = torch.empty_like(logits, dtype=torch.float32)
        self.logits.copy_(logits)

    def choose(self, scores: Tensor, call: GenerateCall, ids: Tensor, kept: dict[str, Any]) -> None:
        """Choose tokens by scores, [batch, vocabulary], and append them. `kept` gets the scores and the logits."""
        if kept.get("logits") is not None:
            kept["logits"] += (scores,)
        for processor in call.processors:
            # As in `generate`: float32, whatever the dtype of the model.
            scores = processor(ids, scores.float())
        if kept.get("scores") is not None:
            kept["scores"] += (scores,)
        if call.config.do_sample:
            # As `torch.multinomial` for one sample, without its checks, for which the host would wait.
            probabilities = scores.float().softmax(-1)
            scores = probabilities / torch.empty_like(probabilities).exponential_()
        chosen = scores.argmax(-1)
        if call.pad is None:
            self.token.copy_(chosen[:, None])
        else:
            torch.where(self.unfinished, chosen, call.pad, out=self.news[0])
        self.ids.index_copy_(1, self.length, self.token)
        self._counters.add_(1)

    def end(self, call: GenerateCall, is_done: Optional[Tensor] = None) -> None:
        """End sequences whose token is an end, or those given, and write the news."""
        if is_done is not None:
            self.unfinished.logical_and_(~is_done)
        elif call.eos is not None:
            # Not `torch.isin`, which waits for the GPU if there are many ids.
            self.unfinished.logical_and_((self.token != call.eos).all(-1))
        self.news[1].copy_(self.unfinished)
