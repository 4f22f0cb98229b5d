"""Compare a candidate's results with the reference's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_judge.judge.reference import Arguments, Reference, Tensors

Given = tuple[Reference, Arguments]  # the reference, and the inputs of results
Slack = float | Tensor  # of a result, or of each element
_ALLOWED = 4.0  # times eager's error
_GROUPS, _LEAST, _PLACES = 1024, 32, 64  # powers of four that float64 has; elements of a group; sums of a group
_UNITS = 4  # in the last place of float32, since sums in another order are as good; of float64 1024 times as many
_FAR = 4.0**10  # times an element: larger ones are not where its rounding error is from
_LARGE_ERROR, _ALLOWED_LARGE = 0.05, 1.5  # of a group's magnitude; the allowed times eager's above it
_PART = {"cpu": 1 << 18, "cuda": 1 << 22}  # elements: parts fit the cache of a CPU, and need few launches on a GPU


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
    slack: Sequence[Slack] = (),
) -> Difference | None:
    """Return where results differ by more than the tolerance, or None.

    An element is right if |a - b| <= tolerance min(1, max |b|) + tolerance |b| + slack, where b is the float64 result,
    or eager's without one. Where eager itself is off by more, and everywhere in a result that is zero but for rounding
    errors, an element near eager's is right, and one that is off by up to four times eager's largest error. An integer
    is right if the reference gives it: as eager, in float64, or for inputs that differ in their last places. Integers
    with an infinite slack are not compared.
    """
    for number, (result, plain, expected) in enumerate(zip(results, eager, exact or eager, strict=True)):
        wrong = _wrong(number, result, plain, expected, tolerance, given, slack[number] if slack else 0.0)
        if bool(wrong.any()):
            return described(number + 1, len(eager), result, expected, wrong)
    return None


def _wrong(
    number: int, result: Tensor, plain: Tensor, expected: Tensor, tolerance: float, given: Given, slack: Slack
) -> Tensor:
    """Return which elements of one result are wrong by the rule of `difference`. `plain` is eager's result."""
    if not plain.is_floating_point():
        wrong = (result != plain) & (result != expected) & (slack != math.inf)
        for other in given[0].nearby(given[1]) if bool(wrong.any()) else ():
            wrong &= result != other[number]
        return wrong
    most = max((largest(part) for (part,) in _parts(expected)), default=0.0)
    absolute: Slack = tolerance * min(1.0, most)
    parts = _parts(result, expected, *([slack] if isinstance(slack, Tensor) else []))
    if not any(bool(differs(a, b, tolerance, absolute + (s[0] if s else slack)).any()) for a, b, *s in parts):
        return torch.zeros_like(plain, dtype=torch.bool)
    a, b, c, absolute = result.double(), expected.double(), plain.double(), absolute + slack
    error = largest(c - b)
    far = differs(a, c, tolerance, absolute) & differs(a, b, tolerance, absolute + _ALLOWED * error)
    return differs(a, b, tolerance, absolute) & (~(differs(c, b, tolerance, absolute) | (error > most)) | far)


def _parts(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield the elements of tensors in float64, some at a time: temporary tensors have 100 bytes for each."""
    split = (torch.split(tensor.flatten(), _PART[tensor.device.type]) for tensor in tensors)
    for some in zip(*split, strict=True):
        yield [part.double() for part in some]


def differs(a: Tensor, b: Tensor, relative: float, absolute: Slack) -> Tensor:
    """Return which elements differ too much; equal infinities and two NaNs do not differ."""
    near = (a - b).abs() <= absolute + relative * b.abs()
    if bool(near.all()) and bool(b.sum().isfinite()):  # the common case
        return ~near
    same = (a == b) | (a.isnan() & b.isnan())
    return ~(near & b.isfinite()) & ~same


def rounding(dtype: torch.dtype) -> float:
    """Return the relative error that sums in another order may have."""
    info = torch.finfo(dtype)
    return _UNITS * (1024 * info.eps if info.bits == 64 else torch.finfo(torch.float32).eps)


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
    facts: dict[str, Any] = {"largest-difference": str(largest) if largest == math.inf else largest, "index": place}
    facts |= {"wrong-elements": count, "elements": wrong.numel(), "got": str(got), "expected": str(expected)}
    return Difference(kind, text, facts)


class _Errors(NamedTuple):
    """Sums and largest values of the elements of a result, by the power of four of the expected value.

    The rows of both tensors: the number of elements, the magnitude, eager's error and the candidate's, and these two
    relative to the elements.
    """

    sums: Tensor
    most: Tensor
    unit: float  # `rounding`

    def in_groups(self, groups: Tensor) -> Tensor:
        """Return the mean and the largest value of each row in joined groups."""
        sums, most = torch.zeros(2, len(self.sums), int(groups[-1]) + 1, dtype=self.sums.dtype)
        sums.index_add_(1, groups, self.sums)
        most.scatter_reduce_(1, groups.expand_as(self.most), self.most, "amax")
        return torch.stack([sums / sums[0].clamp(min=1), most])


class ErrorRule:
    """The errors of a candidate over all inputs of one shape, beside eager's.

    Errors are compared among elements of similar magnitude, so that large elements hide no errors of small ones. The
    expected results alone decide which these are: those in float64, or without them eager's, with twice the tolerance.
    An error is too large only if it is also relative to the elements: the largest of a group may be far larger than the
    others, and its error, too, as in an exponential.
    """

    def __init__(self, tolerance: float, has_exact: bool = True) -> None:
        self._tolerance, self._has_exact = tolerance, has_exact
        self._seen: list[_Errors] = []

    def add(self, results: Tensors, eager: Tensors, expected: Tensors) -> None:
        """Note the errors on one input."""
        errors = list(map(_errors, results, eager, expected))
        both = zip(errors, self._seen, strict=False)
        added = [_Errors(a.sums + b.sums, torch.maximum(a.most, b.most), a.unit) for a, b in both]
        self._seen = added or errors

    def fault(self, ours: Sequence[_Errors] | None = None, factor: float = 1.0) -> str | None:
        """Return why the candidate is less accurate than eager, on all inputs or in other results, or None."""
        ours = self._seen if ours is None else ours
        for number, (errors, seen) in enumerate(zip(ours, self._seen or ours, strict=True), 1):
            counts = errors.sums[0].index_fill(0, torch.tensor(0), 0.0)  # without zeros, in the group of the smallest
            groups = _joined(counts)
            count = torch.zeros(int(groups[-1]) + 1, dtype=counts.dtype).index_add_(0, groups, counts).clamp(min=1)
            _, size, plain, error, relative_plain, relative_error = errors.in_groups(groups).unbind(1)
            others = seen.in_groups(groups)
            eager, relative_eager = torch.maximum(plain, others[:, 2]), torch.maximum(relative_plain, others[:, 4])
            # Elements near zero may be differences of larger ones, with their rounding errors: these are many more.
            largest = size[1]
            larger = (largest >= largest[:, None]) & (largest <= _FAR * largest[:, None])
            scale = torch.minimum(largest * (larger * count).sum(1) / count, (larger * largest).amax(1))
            allowed = factor * self._allowed(eager, errors.unit, scale)
            relative = factor * self._allowed(relative_eager, errors.unit, torch.ones_like(scale))
            for kind, group in ((error > allowed) & (relative_error > relative)).nonzero().tolist():
                ours_there, about, most, eagers = (float(of[kind, group]) for of in (error, size, allowed, eager))
                return (
                    f"{'its error' if len(ours) == 1 else f'the error of result {number}'} is {ours_there:.2g} "
                    f"{('on average', 'at most')[kind]} where results are about {about:.2g}, and {most:.2g} is allowed "
                    f"(eager PyTorch: {eagers:.2g})"
                )
        return None

    def _allowed(self, eager: Tensor, unit: float, scale: Tensor) -> Tensor:
        """Return the mean and the largest error that a candidate may have in each group."""
        if not self._has_exact:
            return torch.stack([2 * self._tolerance * scale, torch.full_like(scale, math.inf)])
        allowed = _ALLOWED * torch.maximum(eager, unit * scale)
        least = torch.maximum(_ALLOWED_LARGE * eager[0], _LARGE_ERROR * scale)
        # Rounding errors of a result that should be zero, such as a gradient, say nothing about precision.
        allowed[0] = torch.where(eager[0] < scale, allowed[0].minimum(least), allowed[0])
        return allowed

    def agree(self, reference: Reference, given: Arguments, results: Tensors, eager: Tensors) -> bool:
        """Return whether results of a timed call are right: near eager's, or else by the rules of the checked inputs.

        There are many more timed calls: twice the tolerance and the error are no failure.
        """
        if not reference.has_rule and all(map(torch.equal, results, eager)):
            return True
        near = self._has_exact and not difference(results, eager, None, self._tolerance, (reference, given))
        if near and not self.fault(list(map(_errors, results, eager, eager)), 2.0):
            return True
        exact = reference.exact(given)
        if reference.has_rule:
            wrong: Any = reference.fault(given, results, eager)
        else:
            wrong = difference(results, eager, exact, 2 * self._tolerance, (reference, given))
        return not wrong and not (self._seen and self.fault(list(map(_errors, results, eager, exact or eager)), 2.0))


def _errors(result: Tensor, plain: Tensor, expected: Tensor) -> _Errors:
    """Return the errors where eager's `plain` and the expected value are finite. Eager's is a quarter unit at least."""
    if not plain.is_floating_point():
        none = torch.zeros(6, _GROUPS, dtype=torch.float64)
        return _Errors(none, none, 0.0)
    # A GPU's threads would wait for each other if all elements of a group were added to one place.
    sums, most = torch.zeros(2, 6, _GROUPS * _PLACES, dtype=torch.float64, device=plain.device)
    info, single = torch.finfo(plain.dtype), torch.finfo(torch.float32)
    for parts in _parts(result, expected, plain):
        finite = parts[1].isfinite() & parts[2].isfinite()
        a, b, c = (part[finite] for part in parts)
        group = (b.view(torch.int64) >> 53) & (_GROUPS - 1)  # all bits of the exponent but the last
        place = group * _PLACES + torch.arange(len(b), device=b.device) % _PLACES
        size = b.abs().clamp(min=info.tiny)
        eager, ours = (c - b).abs(), (a - b).abs().nan_to_num(math.inf)
        errors = torch.maximum(eager, size * (info.eps / 4) + single.tiny), ours
        values = torch.ones_like(b), b.abs(), *errors, (eager / size).clamp(info.eps / 4, 1), ours / size
        for row, value in enumerate(values):
            sums[row].index_add_(0, place, value)
            most[row].scatter_reduce_(0, place, value, "amax")
    sums, most = sums.unflatten(1, (_GROUPS, _PLACES)).sum(2).cpu(), most.unflatten(1, (_GROUPS, _PLACES)).amax(2).cpu()
    return _Errors(sums, most, rounding(plain.dtype))


def _joined(counts: Tensor) -> Tensor:
    """Return the numbers of joined groups, each of several elements."""
    joined, group, held = [], 0, 0.0
    for count in counts.tolist():
        joined.append(group)
        held += count
        if held >= _LEAST:
            group, held = group + 1, 0.0
    return torch.tensor(joined).clamp(max=max(group - 1, 0))  # the last group takes the remaining ones
