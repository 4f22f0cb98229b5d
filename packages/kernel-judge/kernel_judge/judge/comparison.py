"""Compare a candidate's results with the reference's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_builder.api import ALLOWED_PEERS, Deviation, deviation, fault
from kernel_judge.judge.reference import Arguments, Reference, Tensors

Given = tuple[Reference, Arguments]  # the reference, and the inputs of results
_ALLOWED = 4.0  # times eager's largest error, where eager is outside of the tolerance
_LARGEST_ERROR = 0.05  # of a result, relative to its norm, unless eager's is larger


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

    An element is right if |a - b| <= tolerance min(1, max |b|) + tolerance |b| + slack, where b is the float64 result,
    or eager's without one. Where eager itself is off by more, an element near eager's is right, and one that is off by
    up to four times eager's largest error. An integer is right if the reference gives it: as eager, in float64, or for
    inputs that differ in their last places. Integers with an infinite slack are not compared.
    """
    for number, (result, plain, expected) in enumerate(zip(results, eager, exact or eager, strict=True)):
        wrong = _wrong(number, result, plain, expected, tolerance, given, slack[number] if slack else 0.0)
        if bool(wrong.any()):
            return described(number + 1, len(eager), result, expected, wrong)
    return None


def _wrong(
    number: int, result: Tensor, plain: Tensor, expected: Tensor, tolerance: float, given: Given, slack: float
) -> Tensor:
    """Return which elements of one result are wrong by the rule of `difference`. `plain` is eager's result."""
    if not plain.is_floating_point():
        wrong = (result != plain) & (result != expected) & (slack != math.inf)
        for other in given[0].nearby(given[1]) if bool(wrong.any()) else ():
            wrong &= result != other[number]
        return wrong
    a, b, c = result.double(), expected.double(), plain.double()
    absolute = tolerance * min(1.0, largest(b)) + slack
    wrong = differs(a, b, tolerance, absolute)
    if bool(wrong.any()):
        far = differs(a, c, tolerance, absolute) & differs(a, b, tolerance, absolute + _ALLOWED * largest(c - b))
        wrong &= ~differs(c, b, tolerance, absolute) | far
    return wrong


def differs(a: Tensor, b: Tensor, relative: float, absolute: float) -> Tensor:
    """Return which elements differ too much; equal infinities and two NaNs do not differ."""
    near = (a - b).abs() <= absolute + relative * b.abs()
    if bool(near.all()) and bool(b.sum().isfinite()):  # the common case
        return ~near
    same = (a == b) | (a.isnan() & b.isnan())
    return ~(near & b.isfinite()) & ~same


def largest(tensor: Tensor) -> float:
    """Return the largest finite element, without its sign; 0 if there is none."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def described(number: int, results: int, a: Tensor, b: Tensor, wrong: Tensor) -> Difference:
    """Return the wrong elements of one of the results `a`, with the expected values `b`."""
    is_integer, a, b = not b.is_floating_point(), a.double(), b.double()
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
    if is_integer:
        text += (
            "; integers must be the reference's: a task returns floating-point values where rounding decides on them"
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

    def add(self, results: Tensors, eager: Tensors, exact: Tensors) -> None:
        """Note the errors on one input."""
        ours, eagers = _errors(results, eager, exact)
        self._candidate = _largest(self._candidate, ours)
        self.worst = _largest(self.worst, eagers, list(map(_rounding, results)))

    def fault(self) -> str | None:
        """Return why the candidate is less accurate than eager, or None."""
        return _fault(self._candidate, self.worst)

    def agree(self, reference: Reference, given: Arguments, results: Tensors, eager: Tensors) -> bool:
        """Return whether results of a timed call are right: near eager's, or else by the rules of the checked inputs.

        There are many more timed calls: twice the tolerance and the error are no failure.
        """
        if all(map(self._near, results, eager, self.worst or map(_rounding, eager))):
            return True
        exact = reference.exact(given)
        if reference.has_rule:
            if reference.fault(given, results, eager):
                return False
        elif difference(results, eager, exact, 2 * self._tolerance, (reference, given)):
            return False
        if not self.worst or exact is None:
            return True
        ours, eagers = _errors(results, eager, exact)
        return _fault(ours, _largest(self.worst, eagers), 2.0) is None

    def _near(self, result: Tensor, plain: Tensor, worst: Deviation) -> bool:
        """Return whether a result is so near eager's that no float64 is needed."""
        if not plain.is_floating_point():
            return torch.equal(result.to(plain.dtype), plain)
        other = result != plain
        is_near = finite_error(result[other], plain[other]).relative <= 2 * (1 + ALLOWED_PEERS) * worst.relative
        absolute = self._tolerance * min(1.0, largest(plain))
        return is_near and not bool(differs(result.double(), plain.double(), self._tolerance, absolute).any())


def _fault(ours: Sequence[Deviation], eagers: Sequence[Deviation], factor: float = 1.0) -> str | None:
    """Return why errors are too large beside eager's, or None.

    An error of more than a share of the result is too large, however inexact eager is, if it exceeds eager's.
    """
    allowed = [
        Deviation(min(ALLOWED_PEERS * error.relative, max(error.relative, _LARGEST_ERROR)), ALLOWED_PEERS * error.ulps)
        for error in eagers
    ]
    return fault(ours, allowed, factor)


def _rounding(result: Tensor) -> Deviation:
    """Return an error that eager is taken to have at least.

    In float32 it is four units in the last place, since sums in another order are as good; a lower precision is
    thousands of units off. In the 16-bit dtypes it is the rounding error of the exact result.
    """
    if not result.is_floating_point():
        return Deviation(0.0, 0.0)
    eps = torch.finfo(result.dtype).eps
    return Deviation(4 * eps, 4.0) if result.dtype == torch.float32 else Deviation(eps / 4, 0.5)


def _errors(results: Tensors, eager: Tensors, exact: Tensors) -> tuple[list[Deviation], list[Deviation]]:
    """Return the errors of results and those of eager.

    Elements that are equal in both, and rounded float64 results, do not count: the large constant of a mask would make
    all errors small.
    """
    errors = []
    for result, plain, known in zip(results, eager, exact, strict=True):
        other = result != plain
        if plain.is_floating_point():
            other |= (plain - known).abs() > torch.finfo(plain.dtype).eps / 2 * known.abs()
        errors.append((finite_error(result[other], known[other]), finite_error(plain[other], known[other])))
    return [of[0] for of in errors], [of[1] for of in errors]


def finite_error(result: Tensor, exact: Tensor) -> Deviation:
    """Return the error of the elements that are finite in both."""
    if not result.is_floating_point():
        return Deviation(0.0, 0.0)
    finite = result.isfinite() & exact.isfinite()
    return deviation(result, exact) if bool(finite.all()) else deviation(result[finite], exact[finite])


def _largest(*errors: Sequence[Deviation]) -> list[Deviation]:
    """Return the largest errors of each result; a list may be empty."""
    return [Deviation(*map(max, zip(*of_one, strict=True))) for of_one in zip(*filter(None, errors), strict=True)]
