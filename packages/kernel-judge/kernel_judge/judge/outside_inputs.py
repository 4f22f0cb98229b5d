"""Inputs beside a task's own distribution, which a kernel meets in use and the task's random inputs do not show.

A task of `torch.rand` never has a negative input, so that `x.clone()` computes its ReLU. The reference itself decides
which of these inputs are legal: one at which it raises, overflows or returns NaN is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from kernel_judge.judge.comparison import Slack, largest, rounding
from kernel_judge.judge.reference import Arguments, Reference, Tensors

_INFINITE_ELEMENTS = 3
# A kernel may be as far off as rounding errors in its inputs move the results, and as eager is, times this.
_ALLOWED = 4.0
_LEAST_SAME = 0.9
_MUCH = 32.0  # times the relative change of the inputs: the result is a difference, or depends on one

Change = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def _with_signs(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    return torch.where(_uniform(tensor, random) < 0.5, -tensor, tensor)


def _constant_rows(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    return tensor[..., :1].expand_as(tensor).clone() if tensor.dim() else tensor


def _tied(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    step = _magnitude(tensor)
    return ((tensor.double() / step).round() * step).to(tensor.dtype)


def _infinite(value: float) -> Change:
    def change(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        changed = tensor.clone(memory_format=torch.contiguous_format)
        if changed.numel():
            places = torch.randint(changed.numel(), (_INFINITE_ELEMENTS,), generator=random)
            changed.view(-1)[places.to(changed.device)] = value
        return changed

    return change


def _times(factor: float) -> Change:
    return lambda tensor, random: tensor * factor


CHANGES: dict[str, Change] = {
    "inputs with random signs": _with_signs,
    "inputs times 0.001": _times(1e-3),
    "inputs times 30": _times(30.0),
    "inputs times 10000": _times(1e4),
    "inputs with constant rows": _constant_rows,
    "inputs with ties": _tied,
    "inputs of zeros": lambda tensor, random: torch.zeros_like(tensor),
    "inputs with some infinities": _infinite(math.inf),
    "inputs with some negative infinities": _infinite(-math.inf),
}


def outside_inputs(reference: Reference, seed: int) -> Iterator[tuple[str, Arguments]]:
    """Yield inputs that the task's own do not have, each with its name; integers stay as they are."""
    given = reference.arguments(seed)
    if any(map(_can_change, given.tensors)):
        random = torch.Generator().manual_seed(seed)
        for name, change in CHANGES.items():
            yield name, _changed(given, lambda tensor, change=change: change(tensor, random))  # type: ignore[misc]


def expected_results(
    reference: Reference, given: Arguments, least: float = 0.0
) -> tuple[Tensors, Tensors, list[Slack]] | None:
    """Return eager's results, the expected results, and the allowed error of each; None for illegal inputs.

    `least` is the least relative rounding error of the inputs, of a precision that the task's rule accepts. Elements
    that these errors change much, as differences, may have the rounding errors of the task's own results.

    The allowance of an integer result is infinite where rounding errors in the inputs change it, as for the place of a
    maximum among equal numbers, and where it is a place that the reference chooses by nothing but its order.
    """
    try:
        eager, exact = reference.eager(given), reference.exact(given)
        expected = eager if exact is None else exact
        finite = all(bool(tensor.isfinite().all()) for tensor in given.tensors)
        if not all(map(_is_legal, eager, expected, [finite] * len(eager))):
            return None
        random = torch.Generator().manual_seed(given.seed)
        # Where there is float64, the inputs are, too: small changes of large elements would be rounded away.
        moved = _changed(given, lambda tensor: _disturbed(tensor, random, least, in_float64=exact is not None))
        disturbed = reference.eager(moved) if exact is None else reference.exact(moved)
        own = reference.arguments(given.seed)
        usual = reference.eager(own)
    except Exception:  # it refuses these inputs
        return None
    assert disturbed is not None
    pairs = [pair for pair in zip(given.tensors, own.tensors, strict=True) if _can_change(pair[0])]
    ratios = [largest(now) / size for now, before in pairs if (size := largest(before))]
    ratio = max(_ALLOWED, min(ratios, default=0.0))  # tensors for results may hold anything
    allowed = [_allowance(*results, ratio) for results in zip(eager, expected, disturbed, usual, strict=True)]
    for number in _chosen_by_order(reference, given, eager):
        allowed[number] = math.inf
    return eager, expected, allowed


def _chosen_by_order(reference: Reference, given: Arguments, eager: Tensors) -> list[int]:
    """Return which integer results have places in the last dimension that another order of the inputs changes.

    The values that the reference compares may be equal though the inputs are not: probabilities that are all rounded
    to 0. With the task's own inputs most places are equal in both orders; else the result is no choice of places.
    """
    integers = [number for number, plain in enumerate(eager) if not plain.is_floating_point() and plain.numel()]
    if not integers:
        return []
    own = reference.arguments(given.seed)
    usual = _same_in_reverse(reference, own, reference.eager(own))
    now = _same_in_reverse(reference, given, eager)
    return [number for number in integers if usual[number] > _LEAST_SAME and now[number] < 1]


def _same_in_reverse(reference: Reference, given: Arguments, eager: Sequence[torch.Tensor]) -> list[float]:
    """Return the share of each result's places that stay if the last dimension of the inputs is reversed."""
    length = next((tensor.shape[-1] for tensor in given.tensors if tensor.is_floating_point() and tensor.dim()), 0)
    turned = reference.eager(_changed(given, lambda tensor: tensor.flip(-1) if tensor.dim() else tensor))
    return [float((length - 1 - b.long() == a).double().mean()) for a, b in zip(eager, turned, strict=True)]


def _changed(given: Arguments, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    return replace(given, tensors=[change(tensor) if _can_change(tensor) else tensor for tensor in given.tensors])


def _can_change(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1  # Torch does not compute in 8 bits


def _is_legal(eager: torch.Tensor, expected: torch.Tensor, finite: bool) -> bool:
    """Return whether a result is a number everywhere, and as finite as its inputs."""
    if not eager.is_floating_point():
        return True
    if finite:
        return bool(eager.isfinite().all()) and bool(expected.isfinite().all())
    same = (eager.double() == expected.double()) | expected.isfinite()
    return not bool(eager.isnan().any()) and bool(same.all()) and bool((eager.isfinite() == expected.isfinite()).all())


def _disturbed(tensor: torch.Tensor, random: torch.Generator, least: float, *, in_float64: bool) -> torch.Tensor:
    error = max(torch.finfo(tensor.dtype).eps, least) * _magnitude(tensor)
    disturbed = tensor.double() + error * (2 * _uniform(tensor, random).double() - 1)
    return disturbed if in_float64 else disturbed.to(tensor.dtype)


def _allowance(
    eager: torch.Tensor, expected: torch.Tensor, disturbed: torch.Tensor, usual: torch.Tensor, ratio: float
) -> Slack:
    if not eager.is_floating_point():
        return 0.0 if torch.equal(expected, disturbed) and torch.equal(eager, expected) else math.inf
    exact = expected.double()
    moved = disturbed.double() - exact
    error = _ALLOWED * max(largest(eager.double() - exact), largest(moved))
    changed = moved.abs() >= _MUCH * torch.finfo(eager.dtype).eps * exact.abs()
    return error + ratio * rounding(eager.dtype) * changed * usual.double().abs().nan_to_num(0.0, 0.0, 0.0)


def _magnitude(tensor: torch.Tensor) -> float:
    """Return the root mean square of the finite elements; 1 if it is 0."""
    finite = tensor[tensor.isfinite()].double()
    return float(finite.square().mean().sqrt()) or 1.0 if finite.numel() else 1.0


def _uniform(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    return torch.rand(tensor.shape, generator=random).to(tensor.device)
