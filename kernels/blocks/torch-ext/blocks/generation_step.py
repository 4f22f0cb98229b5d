"""One decoding step of `generate` at fixed addresses: forward, logits processors, choice of a token, ends."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .generation_processors import Form, Tokens

# Candidates for each token that top-k keeps, and at least so many: room for scores that are equal to the last of them.
_CANDIDATES, _FEWEST_CANDIDATES = 2, 128
_REPLAYABLE = 32  # graphs of one state: the lengths of a text of some thousand tokens


@dataclass(frozen=True)
class Plan:
    """The computation of a step of one call of `generate`.

    Attributes:
        cache_name: The name of the argument in this release of transformers.
        by_type: Whether the model takes a mask for each type of its layers, by name.
        adds_masks: Whether it adds masks to the products of q and k.
        options: Other arguments of the forward, which do not change.
        forms: The logits processors.
        eos: The ids that end a sequence, or None.
        pad: The token that continues finished sequences, or None.
        samples: Whether tokens are sampled; else the best one is taken.
        keeps_scores, keeps_logits: Whether the caller gets them.
        by_hand: Why tokens are chosen outside of the graph, or None.
    """

    cache_name: str
    by_type: bool
    adds_masks: bool
    options: dict[str, Any]
    forms: tuple[Form, ...]
    eos: Optional[Tensor]
    pad: Optional[Tensor]
    samples: bool
    keeps_scores: bool
    keeps_logits: bool
    by_hand: Optional[str]

    @property
    def key(self) -> tuple:
        """Equal for plans that one graph can serve."""
        eos = None if self.eos is None else (self.eos.shape, self.eos.dtype)
        chosen = tuple(form.key for form in self.forms), eos, self.pad is None, self.samples, self.keeps_scores
        return (
            tuple(self.options.items()),
            self.keeps_logits,
            self.by_hand is None,
            chosen if not self.by_hand else None,
        )

    def candidates(self, vocabulary: int) -> tuple[int, int]:
        """Return from which processor on the best scores are enough, and how many; none if they are not.

        Sampling looks at the whole vocabulary a dozen times, and sorts it. After top-k only some tokens are left.
        """
        for index, form in enumerate(self.forms):
            if form.best is not None and all(later.is_by_score for later in self.forms[index:]):
                count = max(_CANDIDATES * form.best, _FEWEST_CANDIDATES)
                if self.samples and not self.keeps_scores and count <= vocabulary // 4:
                    first = index
                    while first > 0 and self.forms[first - 1].keeps_order:
                        first -= 1
                    return first, count
        return len(self.forms), 0


@dataclass
class StepGraph:
    """A captured step, and the addresses at which it expects the tensors of the processors."""

    replay: Callable[[], None]
    copies: "Copies"


class Copies:
    """Copies of a plan's tensors at fixed addresses."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.forms = [[tensor.to(device, copy=True) for tensor in form.tensors] for form in plan.forms]
            self.eos = None if plan.eos is None else plan.eos.to(device, copy=True)
            self.pad = None if plan.pad is None else plan.pad.to(device, copy=True)

    def fill(self, plan: Plan) -> None:
        for tensors, form in zip(self.forms, plan.forms):
            for fixed, tensor in zip(tensors, form.tensors):
                fixed.copy_(tensor)
        if plan.eos is not None:
            self.eos.copy_(plan.eos)
        if plan.pad is not None:
            self.pad.copy_(plan.pad)


class State:
    """The memory of the sequences of one call, and the graphs of steps on it.

    Attributes:
        cache: Keys and values.
        kind: The number of sequences, and the other properties that compatible calls share.
        tokens: Their tokens.
        news: [batch + 1], read by the host after a step: the new tokens, and whether any sequence continues.
        logits, scores: [batch, vocabulary] in float32, of the last step.
        graphs: By bucket and plan: the captured steps.
        is_busy: Whether a call uses it.
    """

    def __init__(self, cache: Any, kind: tuple, device: torch.device, wait: Callable[[], None]) -> None:
        self.cache = cache
        self.kind = kind
        self._wait = wait  # until the GPU has finished all graphs: they must not be freed before
        self.is_busy = True
        self.graphs: OrderedDict[Any, StepGraph] = OrderedDict()
        self.logits: Optional[Tensor] = None
        self.scores: Optional[Tensor] = None
        self.position_ids: Optional[Tensor] = None
        with torch.inference_mode(False):
            batch = kind[0]
            self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
            self.unfinished = torch.ones(batch, dtype=torch.bool, device=device)
            self.news = torch.zeros(batch + 1, dtype=torch.long, device=device)
            self.tokens = self._room_for_tokens()

    @property
    def bytes(self) -> int:
        outputs = [tensor for tensor in (self.tokens.ids, self.logits, self.scores) if tensor is not None]
        return self.cache.bytes + sum(tensor.nbytes for tensor in outputs)

    def begin(
        self,
        tokens: Tensor,
        attention_mask: Optional[Tensor],
        position_ids: Optional[Tensor],
        eos: Optional[Tensor],
    ) -> None:
        """Prepare for steps after the prefill and the first token.

        Args:
            tokens: [batch, tokens], all of them with the first new one.
            attention_mask: [batch, tokens cached], or None.
            position_ids: [..., batch, tokens cached], or None.
            eos: The ids that end a sequence.
        """
        self.cache.begin(attention_mask)
        self.tokens.ids[:, : tokens.shape[1]] = tokens
        self.tokens.length.fill_(tokens.shape[1])
        self.token.copy_(tokens[:, -1:])
        self.unfinished.fill_(True)
        self._end_sequences(tokens[:, -1], eos)
        if position_ids is None:
            self.position_ids = None
            return
        following = position_ids[..., -1:] + 1
        if self.position_ids is None or self.position_ids.shape != following.shape:
            self.drop_graphs()
            with torch.inference_mode(False):
                self.position_ids = torch.zeros_like(following, memory_format=torch.contiguous_format)
        self.position_ids.copy_(following)

    def grow(self, capacity: int) -> None:
        """Make room for more tokens."""
        self.drop_graphs()
        self.cache.grow(capacity)
        before = self.tokens
        with torch.inference_mode(False):
            self.tokens = self._room_for_tokens()
        self.tokens.ids[:, : before.ids.shape[1]] = before.ids
        self.tokens.length.copy_(before.length)

    def drop_graphs(self) -> None:
        self._wait()
        self.graphs.clear()

    def remember(self, key: Any, graph: StepGraph) -> None:
        self.graphs[key] = graph
        if len(self.graphs) > _REPLAYABLE:
            self._wait()
            self.graphs.popitem(last=False)

    def compute(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        attention: AbstractContextManager,
        plan: Plan,
        bucket: int,
    ) -> Tensor:
        """Return the logits, [batch, vocabulary], of the token after the present one, which is cached.

        This and `finish` are all of one step, on the device, and captured by a graph. This alone may be repeated.
        """
        with self.cache.step(bucket) as read, attention:
            masks = read
            if plan.adds_masks:
                added = self.cache.layers[0].keys.dtype
                masks = {
                    name: torch.zeros_like(mask, dtype=added).masked_fill_(~mask, float("-inf"))
                    for name, mask in read.items()
                }
            positions = {} if self.position_ids is None else {"position_ids": self.position_ids}
            inputs = model.prepare_inputs_for_generation(
                self.token,
                attention_mask=masks if plan.by_type else next(iter(masks.values())),
                use_cache=True,
                **{plan.cache_name: self.cache},
                **positions,
                **plan.options,
            )
            return forward(**inputs, return_dict=True).logits[:, -1]

    def finish(self, logits: Tensor, plan: Plan, copies: Copies) -> None:
        """Choose and write a token by its logits, and find out which sequences end."""
        self.cache.advance()
        if self.position_ids is not None:
            self.position_ids.add_(1)
        if plan.keeps_logits or plan.by_hand is not None:
            self.logits = _keep(self.logits, logits.float())
        if plan.by_hand is None:
            self._choose(logits, plan, copies)

    def _choose(self, scores: Tensor, plan: Plan, copies: Copies) -> None:
        first, count = plan.candidates(scores.shape[-1])
        candidates: Optional[Tensor] = None
        for index, (form, tensors) in enumerate(zip(plan.forms, copies.forms)):
            if index == first:
                scores, candidates = _best_in_order(scores, count)
            # As in `generate`: float32, whatever the dtype of the model. The order of the scores is the same before.
            scores = form.apply(self.tokens, scores.float(), tensors)
        if plan.keeps_scores:
            self.scores = _keep(self.scores, scores.float())
        if plan.samples:
            # As `torch.multinomial` for one sample, without its checks, for which the host would wait.
            probabilities = scores.float().softmax(-1)
            scores = probabilities / torch.empty_like(probabilities).exponential_()
        chosen = _best(scores)
        if candidates is not None:
            chosen = candidates.gather(1, chosen[:, None])[:, 0]
        if copies.pad is not None:
            chosen = torch.where(self.unfinished, chosen, copies.pad)
        self.token.copy_(chosen[:, None])
        self.tokens.ids.index_copy_(1, self.tokens.length, self.token)
        self.tokens.length.add_(1)
        self._end_sequences(chosen, copies.eos)

    def put(self, chosen: Tensor, length: int) -> None:
        """Take tokens, [batch], that were chosen outside of a step, to be at `length`."""
        self.token.copy_(chosen[:, None])
        self.tokens.ids[:, length] = chosen
        self.tokens.length.add_(1)

    def _end_sequences(self, chosen: Tensor, eos: Optional[Tensor]) -> None:
        if eos is not None:
            # Not `torch.isin`, which waits for the GPU if there are many ids.
            self.unfinished.logical_and_((chosen[:, None] != eos).all(-1))
        self.news[:-1].copy_(chosen)
        self.news[-1:].copy_(self.unfinished.any())

    def _room_for_tokens(self) -> Tokens:
        device, room = self.token.device, self.cache.capacity + 1
        ids = torch.zeros(self.kind[0], room, dtype=torch.long, device=device)
        return Tokens(ids, torch.zeros(1, dtype=torch.long, device=device), torch.arange(room, device=device))


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


def _keep(memory: Optional[Tensor], values: Tensor) -> Tensor:
    """Copy values to where the values of the step before were."""
    if memory is None or memory.shape != values.shape:
        with torch.inference_mode(False):
            memory = torch.empty_like(values)
    return memory.copy_(values)
