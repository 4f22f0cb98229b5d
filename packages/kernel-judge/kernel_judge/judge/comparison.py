"""Compare a candidate's results with the reference's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_builder.api import ALLOWED_PEERS, Deviation, deviation, fault
from kernel_judge.judge.reference import Arguments, Reference, Tensors

Given = tuple[Reference, Arguments]  # the reference, and the inputs of results


@dataclass(frozen=True)
class Difference:
    """The first wrong result: the failure's name, its text, and facts such as the largest difference."""

    kind: str
    text: str
    facts: dict[str, Any]


def difference(
    results: Tensors,
    eager: Tensors,
    exact: Tensors | None,
    tolerance: float,
    given: Given,
    slack: Sequence[float] = (),
) -> Difference | None:
    """Return where results differ by more than the tolerance, or None.

    An element is right if |a - b| <= tolerance + tolerance |b|, where b is the float64 result, or eager's without one.
    Where eager itself is off by more, only the comparison of errors applies. An index of another element that is equal
    in the inputs is right, if eager's index depends on the rounding of the inputs.

    With `slack`, the absolute error of each result that is right beside the tolerance, eager's own error does not
    count. With it, and without float64, the tolerance is relative to the largest element where that is below 1: it
    would else be as large as small results.
    """
    slack = slack or ([] if exact else [0.0] * len(eager))
    for number, (result, plain, expected) in enumerate(zip(results, eager, exact or eager, strict=True)):
        wrong = _wrong(number, result, plain, expected, tolerance, given, slack[number] if slack else None)
        if bool(wrong.any()):
            return described(number + 1, len(eager), result.double(), expected.double(), wrong)
    return None


def _wrong(
    number: int,
    result: Tensor,
    plain: Tensor,
    expected: Tensor,
    tolerance: float,
    given: Given,
    allowance: float | None = None,
) -> Tensor:
    """Return which elements of one result are wrong by the rule of `difference`. `plain` is eager's result."""
    if not plain.is_floating_point():
        wrong, moved = (result != plain) & (allowance != math.inf), plain != expected
        if bool(wrong.any()) and plain.dtype != torch.bool:
            ties = wrong & tied(result, plain, given[1].tensors)
            wrong = wrong & ~(ties & given[0].unsettled(given[1], number) if bool(ties.any()) else ties)
        a, b, c = result.double(), plain.double(), expected.double()
        # Numbers in fixed point, which float64 changes, are as near. A few indices may be of other equal elements.
        odd = wrong & moved & (a != c) & ((a - b).abs() > min(4 * largest(b - c), 1 + tolerance * largest(b)))
        return wrong & ~moved | odd & (odd.sum() > moved.sum() / 10)
    a, b = result.double(), expected.double()
    if allowance is not None:
        return differs(a, b, tolerance, tolerance * min(1.0, largest(b)) + allowance)
    wrong = differs(a, b, tolerance, tolerance)
    return wrong & ~differs(plain.double(), b, tolerance, tolerance) if bool(wrong.any()) else wrong


def differs(a: Tensor, b: Tensor, relative: float, absolute: float) -> Tensor:
    """Return which elements differ too much; equal infinities and two NaNs do not differ."""
    near = (a - b).abs() <= absolute + relative * b.abs()
    if bool(near.all()) and bool(b.sum().isfinite()):  # the common case
        return ~near
    same = (a == b) | (a.isnan() & b.isnan())
    return ~(near & b.isfinite()) & ~same


def tied(result: Tensor, plain: Tensor, inputs: Tensors) -> Tensor:
    """Return which integers are indices, along a dimension of the inputs, of elements that equal those of `plain`.

    The order of equal elements is open in `topk`, `sort`, `argmax` and their users. The compared values may be
    a function of the input, rounded to float32: a few units in the last place of that are no difference either. An
    index that a row has twice is none of a tie. All inputs of the least length are equal there, not a mask alone.
    """
    none = torch.zeros_like(plain, dtype=torch.bool)
    ties: dict[tuple[int, int], Tensor] = {}  # by the largest index and the input
    for number, dim in [(number, dim) for number, source in enumerate(inputs) for dim in range(source.dim())]:
        source, chosen, known = inputs[number], result.long(), plain.long()
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
        ties[last, number] = ties.get((last, number), none) | near.reshape(none.shape)
    return torch.stack([near for (last, _), near in ties.items() if last == min(ties)[0]]).all(0) if ties else none


_TIED = 4 * torch.finfo(torch.float32).eps  # units in the last place of float32


def largest(tensor: Tensor) -> float:
    """Return the largest finite element, without its sign; 0 if there is none."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _can_index(index: Tensor, source: Tensor, dim: int) -> bool:
    others = [size for place, size in enumerate(source.shape) if place != dim]
    return (
        source.is_floating_point()
        and index.dim() == source.dim()
        and [size for place, size in enumerate(index.shape) if place != dim] == others
        and index.numel() > 0
        and index.shape[dim] <= source.shape[dim]
        and bool(((index >= 0) & (index < source.shape[dim])).all())
    )


def described(number: int, results: int, a: Tensor, b: Tensor, wrong: Tensor) -> Difference:
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
    facts: dict[str, Any] = {"largest-difference": str(largest) if largest == math.inf else largest}
    facts |= {"wrong-elements": count, "elements": wrong.numel(), "index": place}
    facts |= {"got": str(got), "expected": str(expected)}
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
        self._checked: Counter[int] = Counter()  # the elements of the inputs, by result
        self._compared: Counter[int] = Counter()  # those of timed calls
        self._wrong: Counter[int] = Counter()  # the wrong ones of them

    def add(self, results: Tensors, eager: Tensors, exact: Tensors) -> None:
        """Note the errors on one input."""
        self._candidate = _largest(self._candidate, [finite_error(*pair) for pair in zip(results, exact, strict=True)])
        self._rounding = [_rounding(result.dtype) for result in results]
        self._checked.update({number: result.numel() for number, result in enumerate(results)})
        self.worst = _largest(self.worst, [finite_error(*pair) for pair in zip(eager, exact, strict=True)])

    def fault(self) -> str | None:
        """Return why the candidate is less accurate than eager, or None."""
        return fault(self._candidate, _largest(self.worst, self._rounding), ALLOWED_PEERS)

    def agree(self, reference: Reference, given: Arguments, results: Tensors, eager: Tensors) -> bool:
        """Return whether results of a timed call are right: near eager's, or else by the rules of the other inputs.

        There are many more timed calls: twice the error is no failure, nor a wrong element of as many as were checked.
        """
        if not self.worst:
            return difference(results, eager, None, self._tolerance, (reference, given)) is None
        self._compared.update({number: plain.numel() for number, plain in enumerate(eager)})
        if all(map(self._near, results, eager, self.worst)):
            return True
        known = reference.exact(given) or eager
        for number, tensors in enumerate(zip(results, eager, known, strict=True)):
            self._wrong[number] += int(_wrong(number, *tensors, self._tolerance, (reference, given)).sum())
        if any(self._wrong[number] > 1 + count / self._checked[number] for number, count in self._compared.items()):
            return False
        ours, eagers = ([finite_error(*pair) for pair in zip(side, known, strict=True)] for side in (results, eager))
        return fault(ours, _largest(_largest(self.worst, eagers), self._rounding), 2 * ALLOWED_PEERS) is None

    def _near(self, result: Tensor, plain: Tensor, worst: Deviation) -> bool:
        """Return whether a result is so near eager's that no float64 is needed."""
        if not plain.is_floating_point():
            return torch.equal(result.to(plain.dtype), plain)
        least = max(worst.relative, _rounding(plain.dtype).relative)
        is_near = finite_error(result, plain).relative <= min(
            2 * (1 + ALLOWED_PEERS) * least, max(least, self._tolerance)
        )
        return is_near and not bool(differs(result.double(), plain.double(), self._tolerance, self._tolerance).any())


def _rounding(dtype: torch.dtype) -> Deviation:
    """Return an error that eager is taken to have at least.

    In float32 it is four units in the last place, since sums in another order are as good; a lower precision is
    thousands of units off. In the 16-bit dtypes it is the rounding error of the exact result.
    """
    if not dtype.is_floating_point:
        return Deviation(0.0, 0.0)
    eps = torch.finfo(dtype).eps
    return Deviation(4 * eps, 4.0) if dtype == torch.float32 else Deviation(eps / 4, 0.5)


def finite_error(result: Tensor, exact: Tensor) -> Deviation:
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
