"""What a kernel cannot get away with when it is measured: unwritten results, and changed inputs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernel_builder.measure.case import measure
from kernel_builder.measure.poison import POISON, poisoned
from kernel_builder.measure.results import OURS, Point, Row
from kernel_builder.measure.timing import CpuClock


class Doubled:
    device = "cpu"

    def inputs(self, elements: int) -> tuple[torch.Tensor, ...]:
        return (torch.rand(elements),)

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def measured(function: Callable[..., Any]) -> Row:
    row = Row(Point("doubled", "forward", (5000,), "float32"))
    measure(Doubled(), row, {"eager": Doubled().eager, OURS: function}, CpuClock(), 3)
    return row


def unwritten(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def unwritten_tail(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(x)
    result[:-1] = 2 * x[:-1]
    return result


def in_place(x: torch.Tensor) -> torch.Tensor:
    result = 2 * x
    x.zero_()
    return result


@pytest.mark.parametrize("function", [unwritten, unwritten_tail])
def test_a_result_that_is_not_written_is_wrong(function: Callable[..., Any]) -> None:
    row = measured(function)
    assert "error" in row.faults[OURS] and not row.times


def test_a_kernel_that_changes_its_inputs_is_not_timed() -> None:
    row = measured(in_place)
    assert row.faults == {OURS: "it changes its inputs"} and not row.times


def test_a_right_kernel_is_timed_and_all_implementations_get_the_same_inputs() -> None:
    row = measured(lambda x: x + x)
    assert not row.faults and row.times.keys() >= {OURS, "eager"}


@pytest.mark.parametrize("elements", [2000, 100_000, 3_000_000])
def test_memory_is_poisoned_in_the_context_only(elements: int) -> None:
    with poisoned("cpu"):
        assert bool((torch.empty(elements, dtype=torch.uint8) == POISON).all())
    assert not bool((torch.empty(elements, dtype=torch.uint8).zero_() == POISON).any())


@pytest.mark.parametrize("elements", [10, 1000])
def test_no_result_is_left_in_a_small_tensor(elements: int) -> None:
    results = [torch.full((elements,), 1, dtype=torch.uint8) for _ in range(5)]
    del results
    with poisoned("cpu"):
        unwritten = [torch.empty(elements, dtype=torch.uint8) for _ in range(5)]
    assert not any(bool((tensor == 1).all()) for tensor in unwritten)


@pytest.mark.parametrize("size", [8, 32, 100, 1000, 5000])
def test_nothing_is_left_in_small_blocks_that_were_freed_before(size: int) -> None:
    """Blocks with used ones between them: glibc cannot join these, and hands on seven at a time."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(size) for _ in range(200)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[::2]:
        libc.free(block)
    with poisoned("cpu"):
        taken = [libc.malloc(size) for _ in range(60)]
        contents = [ctypes.string_at(block, size) for block in taken]
    for block in [*taken, *blocks[1::2]]:
        libc.free(block)
    # Python frees blocks of its own within the context.
    assert sum(b"\1" * (size // 2) in content for content in contents) <= 1
