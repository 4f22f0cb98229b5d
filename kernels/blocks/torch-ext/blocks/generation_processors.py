"""Logits processors and stopping criteria of transformers in a form that CUDA graphs can have.

A graph repeats the captured operations, so a form reads the number of tokens from a tensor, not from a shape, and keeps
the tensors of a processor at fixed addresses. Processors that do not look at the tokens are called unchanged. Unknown
processors, such as a user's own, have no form: their calls stay outside of the graph.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from .calls import is_value


@dataclass(frozen=True)
class Tokens:
    """The tokens of all sequences at fixed addresses.

    Attributes:
        ids: [batch, room], of which the first `length` are tokens.
        length: [1], on the device.
        index: [room], the numbers from 0 on.
    """

    ids: Tensor
    length: Tensor
    index: Tensor

    def or_else(self, other: int) -> Tensor:
        """Return the tokens, with `other` where there are none."""
        return torch.where(self.index < self.length, self.ids, other)


# Takes the tokens, the scores, and the tensors of the form, or copies of them.
Apply = Callable[[Tokens, Tensor, Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Form:
    """A processor, or a criterion, for a graph.

    Attributes:
        key: Equal for those that one graph can serve.
        tensors: Tensors whose contents may differ between them.
        apply: Computes new scores.
        best: How many of the best scores it keeps, besides those that are equal to the last of them; or None.
        is_by_score: Whether it looks at nothing but the scores, whichever tokens they are of.
        keeps_order: Whether better scores stay better, each for itself.
    """

    key: tuple
    tensors: tuple[Tensor, ...]
    apply: Apply
    best: Optional[int] = None
    is_by_score: bool = False
    keeps_order: bool = False


class Formless(Exception):
    """There is no form. The message names the processor and the reason."""


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def form_of(processor: Any) -> Form:
    """Return the form of a logits processor.

    Raises:
        Formless: If it has none.
    """
    cls = type(processor)
    path = _path_of(cls)
    library, _, name = path.rpartition(".")
    make = _FORMS.get(name) if library == "transformers.generation.logits_process" else None
    if make is None:
        raise Formless(f"the logits processor {cls.__name__} cannot be part of a graph")
    try:
        values, tensors, apply = make(processor)
    except AttributeError as error:
        raise Formless(f"the logits processor {cls.__name__} has another structure than expected: {error}") from None
    if not all(is_value(value) for value in values):
        raise Formless(f"the logits processor {cls.__name__} has values that two calls cannot be compared by")
    shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
    key = path, tuple((type(value), value) for value in values), shapes
    best = processor.top_k if name == "TopKLogitsWarper" else None
    return Form(key, tuple(tensors), apply, best, name in _BY_SCORE, name == "TemperatureLogitsWarper")


def eos_of(criterion: Any) -> Optional[Tensor]:
    """Return the ids that end a sequence, if that is all that a stopping criterion is about."""
    if _path_of(type(criterion)) == "transformers.generation.stopping_criteria.EosTokenCriteria":
        return criterion.eos_token_id
    return None


Made = tuple[list[Any], list[Tensor], Apply]


def _as_it_is(processor: Any) -> Made:
    values = {name: value for name, value in vars(processor).items() if not isinstance(value, Tensor)}
    tensors = {name: value for name, value in vars(processor).items() if isinstance(value, Tensor)}
    fixed = copy.copy(processor)

    def apply(tokens: Tokens, scores: Tensor, copies: Sequence[Tensor]) -> Tensor:
        vars(fixed).update(zip(tensors, copies))
        return fixed(tokens.ids, scores)

    return [*values, *values.values()], list(tensors.values()), apply


def _repetition_penalty(processor: Any) -> Made:
    penalty, ignored = processor.penalty, processor.prompt_ignore_length
    if processor.logits_indices is not None or processor.cu_seq_lens_q is not None:
        raise AttributeError("it is for packed sequences")
    by_sequence = isinstance(ignored, Tensor)

    def apply(tokens: Tokens, scores: Tensor, copies: Sequence[Tensor]) -> Tensor:
        vocabulary = scores.shape[-1]
        ids = tokens.or_else(vocabulary)
        if ignored is not None:
            first = copies[0][:, None] if by_sequence else ignored
            ids = ids.masked_fill(tokens.index < first, vocabulary)
        marks = torch.zeros(scores.shape[0], vocabulary + 1, dtype=torch.bool, device=scores.device)
        marks.scatter_(1, ids.clamp(max=vocabulary), True)
        penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
        return torch.where(marks[:, :vocabulary], penalized, scores)

    return [penalty, None if by_sequence else ignored], [ignored] if by_sequence else [], apply


def _no_repeated_ngram(processor: Any) -> Made:
    size = processor.ngram_size

    def apply(tokens: Tokens, scores: Tensor, copies: Sequence[Tensor]) -> Tensor:
        vocabulary, room = scores.shape[-1], tokens.ids.shape[1]
        if room < size:
            return scores
        windows = tokens.ids.unfold(1, size, 1)
        last = (tokens.length - size + 1 + tokens.index[: size - 1]).clamp(min=0)
        prefix = tokens.ids.index_select(1, last)
        is_whole = tokens.index[: windows.shape[1]] + size <= tokens.length
        matches = (windows[..., :-1] == prefix[:, None]).all(-1) & is_whole
        banned = torch.zeros(scores.shape[0], vocabulary + 1, dtype=torch.bool, device=scores.device)
        banned.scatter_(1, torch.where(matches, windows[..., -1].clamp(max=vocabulary), vocabulary), True)
        return scores.masked_fill(banned[:, :vocabulary], float("-inf"))

    return [size], [], apply


def _min_length(processor: Any) -> Made:
    return _without_eos_before(processor.min_length, processor.eos_token_id)


def _min_new_tokens(processor: Any) -> Made:
    return _without_eos_before(processor.prompt_length_to_skip + processor.min_new_tokens, processor.eos_token_id)


def _without_eos_before(length: int, eos: Tensor) -> Made:
    # A number in a tensor, because it may count the prompt: one graph serves all prompts.
    def apply(tokens: Tokens, scores: Tensor, copies: Sequence[Tensor]) -> Tensor:
        return scores.masked_fill((tokens.length < copies[1]) & _are_in(copies[0], scores), float("-inf"))

    return [], [eos, torch.tensor([length], device=eos.device)], apply


def _suppress_at_begin(processor: Any) -> Made:
    def apply(tokens: Tokens, scores: Tensor, copies: Sequence[Tensor]) -> Tensor:
        return scores.masked_fill((tokens.length == copies[1]) & _are_in(copies[0], scores), float("-inf"))

    suppressed = processor.begin_suppress_tokens
    return [], [suppressed, torch.tensor([processor.begin_index], device=suppressed.device)], apply


def _forced(ids: Tensor, length: int) -> Made:
    def apply(tokens: Tokens, scores: Tensor, copies: Sequence[Tensor]) -> Tensor:
        forced = torch.where(_are_in(copies[0], scores), 0.0, float("-inf")).to(scores.dtype)
        return torch.where(tokens.length == copies[1], forced, scores)

    return [], [ids, torch.tensor([length], device=ids.device)], apply


def _forced_bos(processor: Any) -> Made:
    return _forced(torch.tensor([processor.bos_token_id]), 1)


def _forced_eos(processor: Any) -> Made:
    return _forced(processor.eos_token_id, processor.max_length - 1)


def _are_in(ids: Tensor, scores: Tensor) -> Tensor:
    """Return for each entry of the vocabulary whether it is among `ids`."""
    return torch.isin(torch.arange(scores.shape[-1], device=scores.device), ids)


_BY_SCORE = {
    "EpsilonLogitsWarper",
    "LogitNormalization",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
_FORMS: dict[str, Callable[[Any], Made]] = {
    **dict.fromkeys(
        (
            "EpsilonLogitsWarper",
            "InfNanRemoveLogitsProcessor",
            "LogitNormalization",
            "MinPLogitsWarper",
            "SuppressTokensLogitsProcessor",
            "TemperatureLogitsWarper",
            "TopKLogitsWarper",
            "TopPLogitsWarper",
            "TypicalLogitsWarper",
        ),
        _as_it_is,
    ),
    "ForcedBOSTokenLogitsProcessor": _forced_bos,
    "ForcedEOSTokenLogitsProcessor": _forced_eos,
    "MinLengthLogitsProcessor": _min_length,
    "MinNewTokensLengthLogitsProcessor": _min_new_tokens,
    "NoRepeatNGramLogitsProcessor": _no_repeated_ngram,
    "RepetitionPenaltyLogitsProcessor": _repetition_penalty,
    "SuppressTokensAtBeginLogitsProcessor": _suppress_at_begin,
}
