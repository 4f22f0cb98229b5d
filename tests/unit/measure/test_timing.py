"""How calls are timed, medians and their confidence intervals, and the accuracy of results."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kernel_builder.measure.accuracy import deviation, fault
from kernel_builder.measure.results import estimate
from kernel_builder.measure.timing import MOST_SETS, CpuClock, interleaved, sets_needed


def test_the_sets_are_four_times_as_large_as_the_cache() -> None:
    for moved in (1 << 10, 1 << 20, 1 << 25, 1 << 30):
        sets = sets_needed(50 << 20, moved)
        assert 2 <= sets <= MOST_SETS
        assert sets * moved > 4 * (50 << 20) or sets == MOST_SETS
        assert (sets - 2) * moved < 4 * (50 << 20), "no more sets than needed"


def test_each_round_starts_with_another_run() -> None:
    order: list[str] = []

    def run(name: str, seconds: float) -> Callable[[], float]:
        return lambda: order.append(name) or seconds  # type: ignore[func-returns-value]

    samples = interleaved({name: run(name, ord(name)) for name in "abc"}, 4)
    assert samples == {name: [ord(name)] * 4 for name in "abc"}
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"


def test_a_series_cycles_through_the_sets_and_returns_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock advances with the calls alone."""
    now, seen = [0.0], list[int]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call(number: int) -> None:
        seen.append(number)
        now[0] += 1e-3

    clock = CpuClock()
    run, method = clock.series([partial(call, number) for number in range(4)])
    seen.clear()
    assert run() == pytest.approx(1e-3) and method == "wall clock"
    assert seen == [number % 4 for number in range(len(seen))] and len(seen) >= 4
    assert 1 << 18 <= clock.cache < 1 << 31, "bytes of the last-level cache"


@pytest.mark.parametrize("number", [6, 15, 21, 40])
def test_intervals_contain_the_true_median_with_the_stated_confidence(number: int) -> None:
    chance = random.Random(0)
    trials = 2000
    held = 0
    for _ in range(trials):
        interval = estimate([chance.expovariate(1.0) for _ in range(number)])
        # The median of this distribution, which is far from symmetric.
        held += interval.low <= 0.693147 <= interval.high
    assert 0.94 < held / trials < (0.99 if number > 6 else 1), "no wider than needed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_correct_rounding_is_at_most_half_an_ulp(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = torch.rand(1000, dtype=torch.float64)
    measured = deviation(exact.to(dtype), exact)
    assert 0 < measured.relative < torch.finfo(dtype).eps and 0.2 < measured.ulps <= 0.5
    assert fault([measured], [measured], 1.1) is None


def test_wrong_shapes_and_infinities_deviate_infinitely() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    assert deviation(torch.ones(2, 2), exact) == deviation(exact.float() / 0, exact) == (math.inf, math.inf)
    assert deviation(torch.ones(0), torch.ones(0, dtype=torch.float64)) == (0, 0)
