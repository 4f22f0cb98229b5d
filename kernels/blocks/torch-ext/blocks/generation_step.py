"""One decoding step of `generate` at fixed addresses: forward, logits processors, choice of a token, ends."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from .generation_cache import FixedCache
from .generation_call import GenerateCall

_REPLAYABLE = 8  # graphs of one state, by the processors of their calls


class State:
    """The memory of the sequences of one call, and the graphs of steps on it.

    Attributes:
        cache: Keys and values.
        kind: The number of sequences, and the other properties that compatible calls share.
        ids: [batch, room], their tokens, of which the first `length` are theirs, and the others repeat one of them.
        length: [1].
        token: [batch, 1], the last one.
        unfinished: [batch], whether a sequence continues.
        news: [batch + 1], read by the host after a step: the new tokens, and whether any sequence continues.
        logits: [batch, vocabulary] in float32, of the last step, for calls that choose tokens outside of it.
        position_ids: Of the next step, for models whose callers give them.
        graphs: By the key of a call: a function that replays its step, and the owners of its inputs.
    """

    def __init__(self, kind: tuple, call: GenerateCall, capacity: int) -> None:
        self.kind = kind
        self.cache = FixedCache(call.windows, call.cache, capacity)
        self.graphs: OrderedDict[Any, tuple[Callable[[], None], Any]] = OrderedDict()
        self.logits: Optional[Tensor] = None
        self.position_ids: Optional[Tensor] = None
        with torch.inference_mode(False):
            self.length = torch.zeros_like(self.cache.position)
            self.ids = self.length.new_zeros(kind[0], capacity + 1)
            self.token = self.length.new_zeros(kind[0], 1)
            self.news = self.length.new_zeros(kind[0] + 1)
            self.unfinished = self.length.new_ones(kind[0], dtype=torch.bool)

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in (*self.cache.tensors, self.ids, self.logits) if x is not None)

    def begin(self, call: GenerateCall, tokens: Tensor, wait: Callable[[], None]) -> None:
        """Prepare for steps after the prefill and the first token.

        Args:
            call: Its cache has the content of the prefill.
            tokens: [batch, tokens], all of them with the first new one.
            wait: Waits until the GPU has finished all graphs: they must not be freed before.
        """
        self.cache.take(call.cache, call.kwargs.get("attention_mask"))
        self.ids.copy_(tokens[:, -1:].expand_as(self.ids))
        self.ids[:, : tokens.shape[1]] = tokens
        self.length.fill_(tokens.shape[1])
        self.token.copy_(tokens[:, -1:])
        self.unfinished.fill_(True)
        given = call.kwargs.get("position_ids")
        following = None if given is None else given[..., -1:] + 1
        if getattr(following, "shape", None) != getattr(self.position_ids, "shape", None):
            wait()
            self.graphs.clear()
            with torch.inference_mode(False):
                self.position_ids = None if following is None else torch.zeros(following.shape).to(following)
        if following is not None:
            self.position_ids.copy_(following)

    def resize(self, call: GenerateCall, capacity: int, wait: Callable[[], None]) -> None:
        """Make room for more tokens, without the graphs."""
        if capacity <= self.cache.capacity:
            return
        wait()
        self.graphs.clear()
        before, self.cache = self.cache, FixedCache(call.windows, self.cache, capacity)
        self.cache.copy(before)
        with torch.inference_mode(False):
            more = self.ids.new_zeros(self.kind[0], capacity + 1 - self.ids.shape[1])
        more.copy_(self.ids[:, -1:].expand_as(more))  # the first that was generated, or a later one
        self.ids = torch.cat((self.ids, more), 1)

    def remember(self, call: GenerateCall, replay: Callable[[], None], wait: Callable[[], None]) -> None:
        self.graphs[call.key] = replay, (call.processors, call.eos, call.pad)
        if len(self.graphs) > _REPLAYABLE:
            wait()
            self.graphs.popitem(last=False)

    def compute(self, model: Any, forward: Callable[..., Any], call: GenerateCall) -> Tensor:
        """Return the logits, [batch, vocabulary], of the token after the present one, which is cached.

        This and `finish` are all of one step, on the device, and captured by a graph. This alone may be repeated.
        """
        masks = self.cache.begin_step()
        if model.config.get_text_config(decoder=True)._attn_implementation == "eager":  # it adds masks to products
            dtype = self.cache.layers[0].keys.dtype
            masks = {
                name: torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
                for name, mask in masks.items()
            }
        positions = {} if self.position_ids is None else {"position_ids": self.position_ids}
        inputs = model.prepare_inputs_for_generation(
            self.token,
            attention_mask=masks if call.takes_masks_by_type else next(iter(masks.values())),
            use_cache=True,
            **{call.cache_name: self.cache},
            **positions,
            **call.options,
        )
        return forward(**inputs, return_dict=True).logits[:, -1]

    def finish(self, logits: Tensor, call: GenerateCall) -> None:
        """Choose and write a token by its logits, and find out which sequences end."""
        self.cache.position.add_(1)
        if self.position_ids is not None:
            self.position_ids.add_(1)
        if call.by_hand is None:
            self._choose(logits, call)
            return
        if self.logits is None or self.logits.shape != logits.shape:
            with torch.inference_mode(False):
                self.logits = torch.empty_like(logits, dtype=torch.float32)
        self.logits.copy_(logits)

    def _choose(self, scores: Tensor, call: GenerateCall) -> None:
        first, count = call.candidates(scores.shape[-1])
        candidates: Optional[Tensor] = None
        for index, processor in enumerate(call.processors):
            if index == first:
                scores, candidates = _best_in_order(scores, count)
            # As in `generate`: float32, whatever the dtype of the model. The order of the scores is the same before.
            scores = processor(self.ids, scores.float())
        if call.config.do_sample:
            # As `torch.multinomial` for one sample, without its checks, for which the host would wait.
            probabilities = scores.float().softmax(-1)
            scores = probabilities / torch.empty_like(probabilities).exponential_()
        chosen = _best(scores)
        if candidates is not None:
            chosen = candidates.gather(1, chosen[:, None])[:, 0]
        self._put(chosen, call)
        self.end(call)

    def choose_by_hand(self, call: GenerateCall, length: int, kept: dict[str, Any]) -> None:
        """Choose tokens as transformers does, after the logits of a step. `kept` gets the scores and the logits."""
        logits = self.logits.clone()
        scores = call.processors(self.ids[:, :length], logits)
        if call.keeps_logits:
            kept["logits"] += (logits,)
        if call.keeps_scores:
            kept["scores"] += (scores,)
        chosen = torch.multinomial(scores.softmax(-1), 1)[:, 0] if call.config.do_sample else scores.argmax(-1)
        self._put(chosen, call)
        self.end(call, call.criteria(self.ids[:, : length + 1], kept.get("scores")))

    def _put(self, chosen: Tensor, call: GenerateCall) -> None:
        if call.pad is not None:
            chosen = torch.where(self.unfinished, chosen, call.pad)
        self.token.copy_(chosen[:, None])
        self.ids.index_copy_(1, self.length, self.token)
        self.length.add_(1)

    def end(self, call: GenerateCall, is_done: Optional[Tensor] = None) -> None:
        """End sequences whose token is an end, or those given, and write the news."""
        if is_done is None and call.eos is not None:
            # Not `torch.isin`, which waits for the GPU if there are many ids.
            is_done = (self.token == call.eos).any(-1)
        if is_done is not None:
            self.unfinished.logical_and_(~is_done)
        self.news[:-1].copy_(self.token[:, 0])
        self.news[-1:].copy_(self.unfinished.any())


def _best(scores: Tensor) -> Tensor:
    """Return the index of the best score of each row, the first of those that are equal.

    Torch's kernel reads a row with one block, which takes 26 us for 128,256 scores (H100). Several rows are faster.
    """
    parts = next((parts for parts in (64, 48, 32, 16) if scores.shape[1] % parts == 0), 1)
    best, index = scores.view(scores.shape[0], parts, -1).max(-1)
    part = best.argmax(-1, keepdim=True)
    return (part * (scores.shape[1] // parts) + index.gather(1, part))[:, 0]


def _best_in_order(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the best scores of each row, the best first, and their indices, which rise where scores are equal.

    `topk` gives equal scores in another order each time, and with the same random numbers other tokens would be chosen.
    Which of the scores that are equal to the last one it returns does not matter: top-k drops them.
    """
    indices = scores.topk(count, sorted=False).indices.sort(-1).values
    best, order = scores.gather(1, indices).sort(dim=-1, descending=True, stable=True)
    return best, indices.gather(1, order)
