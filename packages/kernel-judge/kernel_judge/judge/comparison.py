"""Compare a candidate's results with the reference's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernel_builder.api import ALLOWED_PEERS, Deviation, deviation, fault


@dataclass(frozen=True)
class Difference:
    """The first wrong result: the failure's name, its text, and facts such as the largest difference."""

    kind: str
    text: str
    facts: dict[str, Any]


def difference(
    results: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor] | None,
    tolerance: float,
    inputs: Sequence[torch.Tensor],
) -> Difference | None:
    """Return where results differ by more than the tolerance, or None.

    An element is right if |a - b| <= tolerance + tolerance |b|, where b is the float64 result, or eager's without one.
    Where eager itself is off by more, only the comparison of errors applies. An index of another element of an input
    that is equal is right.
    """
    for number, (result, plain, expected) in enumerate(zip(results, eager, exact or eager, strict=True), 1):
        if not plain.is_floating_point():
            wrong = (result != plain) & (plain == expected) & ~tied(result, plain, inputs)
        else:
            wrong = differs(result.double(), expected.double(), tolerance, tolerance)
            if bool(wrong.any()):
                wrong &= ~differs(plain.double(), expected.double(), tolerance, tolerance)
        if bool(wrong.any()):
            return described(number, len(eager), result.double(), expected.double(), wrong)
    return None


def differs(a: torch.Tensor, b: torch.Tensor, relative: float, absolute: float) -> torch.Tensor:
    """Return which elements differ too much; equal infinities and two NaNs do not differ."""
    near = (a - b).abs() <= absolute + relative * b.abs()
    if bool(near.all()) and bool(b.sum().isfinite()):  # the common case
        return ~near
    same = (a == b) | (a.isnan() & b.isnan())
    return ~(near & b.isfinite()) & ~same


def tied(result: torch.Tensor, plain: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return which integers are indices, along a dimension of an input, of elements that equal those of `plain`.

    The order of equal elements is open in `topk`, `sort`, `argmax` and their users. The compared values may be
    a function of the input, rounded to float32: a few units in the last place of that are no difference either. An
    index that a row has twice is none of a tie.
    """
    ties = torch.zeros_like(plain, dtype=torch.bool)
    if plain.is_floating_point() or plain.dtype == torch.bool:
        return ties
    for source in inputs:
        for dim in range(source.dim()):
            chosen, known = result.long(), plain.long()
            if chosen.dim() == source.dim() - 1:
                chosen, known = chosen.unsqueeze(dim), known.unsqueeze(dim)
            if not _can_index(known, source, dim):
                continue
            last = source.shape[dim] - 1
            a, b = (source.gather(dim, index.clamp(0, last)).double() for index in (chosen, known))
            ordered, order = chosen.sort(dim)
            again = torch.zeros_like(ordered, dtype=torch.bool)
            again.narrow(dim, 1, max(0, again.shape[dim] - 1)).copy_(ordered.diff(dim=dim) == 0)
            repeated = torch.zeros_like(again).scatter(dim, order, again)
            near = ~differs(a, b, _TIED, _TIED) & (chosen >= 0) & (chosen <= last) & ~repeated
            ties |= near.reshape(ties.shape)
    return ties


# Units in the last place of float32.
_TIED = 4 * torch.finfo(torch.float32).eps


def _can_index(index: torch.Tensor, source: torch.Tensor, dim: int) -> bool:
    others = [size for place, size in enumerate(source.shape) if place != dim]
    return (
        source.is_floating_point()
        and index.dim() == source.dim()
        and [size for place, size in enumerate(index.shape) if place != dim] == others
        and index.numel() > 0
        and index.shape[dim] <= source.shape[dim]
        and bool(((index >= 0) & (index < source.shape[dim])).all())
    )


def described(number: int, results: int, a: torch.Tensor, b: torch.Tensor, wrong: torch.Tensor) -> Difference:
    """Return the wrong elements of one of the results, in float64, with the expected values `b`."""
    which = "the result" if results == 1 else f"result {number} of {results}"
    kind = "not-finite" if bool((wrong & ~a.isfinite() & b.isfinite()).any()) else "wrong-result"
    count = int(wrong.sum())
    place = [int(index) for index in wrong.nonzero()[0]]
    got, expected = float(a[tuple(place)]), float(b[tuple(place)])
    largest = float((a - b).abs()[wrong].nan_to_num(torch.inf).max())
    text = (
        f"{count} of {wrong.numel()} elements of {which} are wrong; the first is {got:.6g} at {place}, "
        f"expected {expected:.6g}"
    )
    facts: dict[str, Any] = {
        "largest-difference": str(largest) if largest == float("inf") else largest,
        "wrong-elements": count,
    }
    facts |= {"elements": wrong.numel(), "index": place, "got": str(got), "expected": str(expected)}
    return Difference(kind, text, facts)


class ErrorRule:
    """The error of a candidate against float64, over all inputs of one kind, beside eager's.

    One input can favour eager by chance, a single number above all. So the candidate's error on each input is compared
    with eager's largest.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self.worst: list[Deviation] = []
        self._candidate: list[Deviation] = []
        self._rounding: list[Deviation] = []

    def add(
        self, results: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
    ) -> None:
        """Note the errors on one input."""
        self._candidate = _largest(self._candidate, [finite_error(*pair) for pair in zip(results, exact, strict=True)])
        self._rounding = [_rounding(result.dtype) for result in results]
        self.worst = _largest(self.worst, [finite_error(*pair) for pair in zip(eager, exact, strict=True)])

    def fault(self) -> str | None:
        """Return why the candidate is less accurate than eager, or None."""
        return fault(self._candidate, _largest(self.worst, self._rounding), ALLOWED_PEERS)

    def agree(self, results: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> bool:
        """Return whether results agree with eager's, without float64, within the errors that were noted."""
        for number, (result, plain) in enumerate(zip(results, eager, strict=True)):
            if not plain.is_floating_point():
                if not torch.equal(result.to(plain.dtype), plain) and not self.worst:
                    return False
                continue
            a, b = result.double(), plain.double()
            if not self.worst:
                if bool(differs(a, b, self._tolerance, self._tolerance).any()):
                    return False
                continue
            error, norm = float((a - b).norm()), float(b.norm())
            if not math.isfinite(error):
                finite = b.isfinite()
                if not bool((finite == a.isfinite()).all()) or bool(differs(a[~finite], b[~finite], 0.0, 0.0).any()):
                    return False
                error, norm = float((a - b)[finite].norm()), float(b[finite].norm())
            # Both results may be off, and this input may be harder than those that were noted.
            worst = max(self.worst[number].relative, _rounding(plain.dtype).relative)
            if error / max(norm, torch.finfo(torch.float64).tiny) > 2 * (1 + ALLOWED_PEERS) * worst:
                return False
        return True


def _rounding(dtype: torch.dtype) -> Deviation:
    """Return an error that eager is taken to have at least.

    In float32 it is four units in the last place, since sums in another order are as good; a lower precision is
    thousands of units off. In the 16-bit dtypes it is the rounding error of the exact result.
    """
    if not dtype.is_floating_point:
        return Deviation(0.0, 0.0)
    eps = torch.finfo(dtype).eps
    return Deviation(4 * eps, 4.0) if dtype == torch.float32 else Deviation(eps / 4, 0.5)


def finite_error(result: torch.Tensor, exact: torch.Tensor) -> Deviation:
    """Return the error of the elements that are finite in float64."""
    if not result.is_floating_point():
        return Deviation(0.0, 0.0)
    error = deviation(result, exact)
    if math.isfinite(error.relative) or bool((finite := exact.isfinite()).all()):
        return error
    return deviation(result[finite], exact[finite])


def _largest(worst: Sequence[Deviation], other: Sequence[Deviation]) -> list[Deviation]:
    if not worst:
        return list(other)
    return [Deviation(max(a.relative, b.relative), max(a.ulps, b.ulps)) for a, b in zip(worst, other, strict=True)]
