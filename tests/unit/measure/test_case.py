"""A measurement finds unwritten results and changed inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernel_builder.measure.accuracy import POISON, poisoned
from kernel_builder.measure.case import measure
from kernel_builder.measure.results import OURS, Point, Row
from kernel_builder.measure.timing import CpuClock


class Doubled:
    device = "cpu"

    def inputs(self, elements: int) -> tuple[torch.Tensor, ...]:
        return (torch.rand(elements),)

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Selected:
    """Inputs and results of which some are booleans or integers."""

    device = "cpu"

    def inputs(self, elements: int) -> tuple[torch.Tensor, ...]:
        return torch.rand(elements), torch.rand(elements) > 0.5, torch.randperm(elements)

    def trained(self, x: torch.Tensor, mask: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x,)

    def saved(self, x: torch.Tensor, mask: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return mask, index

    def eager(self, x: torch.Tensor, mask: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.where(mask, x[index], 0), ~mask, 2 * index


def measured(function: Callable[..., Any], workload: Any = Doubled, passes: str = "forward") -> Row:
    row = Row(Point("operation", passes, (5000,), "float32"))
    measure(workload(), row, {"eager": workload().eager, OURS: function}, CpuClock(), 3)
    return row


def unwritten_tail(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(x)
    result[:-1] = 2 * x[:-1]
    return result


def in_place(x: torch.Tensor) -> torch.Tensor:
    result = 2 * x
    x.zero_()
    return result


FAULTY = {
    "unwritten": torch.empty_like,
    "unwritten tail": unwritten_tail,
    "rough": lambda x: (2e5 * x).int() * 1e-5,
    "not a number": lambda x: (2 * x).index_fill(0, torch.tensor([1000]), float("nan")),
    "in place": in_place,
}


@pytest.mark.parametrize("function", FAULTY.values(), ids=FAULTY)
def test_a_wrong_result_or_a_changed_input_is_not_timed(function: Callable[..., Any]) -> None:
    row = measured(function)
    assert ("it changes its inputs" if function is in_place else "error") in row.faults[OURS] and not row.times


@pytest.mark.parametrize("passes", ["forward", "backward", "forward + backward"])
def test_integers_and_booleans_are_compared_and_get_no_gradient(passes: str) -> None:
    def wrong(x: torch.Tensor, mask: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        selected, inverse, doubled = Selected().eager(x, mask, index)
        return selected, inverse, doubled.index_fill(0, torch.tensor([1000]), 7)

    row = measured(Selected().eager, Selected, passes)
    assert not row.faults and row.times.keys() >= {OURS, "eager"}
    assert passes == "backward" or "error of result 3" in measured(wrong, Selected, passes).faults[OURS]


@pytest.mark.parametrize("elements", [2000, 100_000, 3_000_000])
def test_memory_is_poisoned_in_the_context_only(elements: int) -> None:
    with poisoned("cpu"):
        assert bool((torch.empty(elements, dtype=torch.uint8) == POISON).all())
    assert not bool((torch.empty(elements, dtype=torch.uint8).zero_() == POISON).any())
