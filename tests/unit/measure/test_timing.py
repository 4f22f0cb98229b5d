"""How calls are timed: with more data than the cache holds, and in turn."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kernel_builder.measure.timing import MOST_SETS, CpuClock, host_series, interleaved, sets_needed


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


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replace the wall clock by one that advances only when `spend(seconds)` is called."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    return spend


def test_a_series_cycles_through_the_sets_and_returns_the_time_of_one_call(spend: Callable[[float], None]) -> None:
    seen: list[int] = []

    def call(number: int) -> Callable[[], None]:
        def record() -> None:
            seen.append(number)
            spend(1e-3)

        return record

    run, method = CpuClock().series([call(number) for number in range(4)])
    seen.clear()
    assert run() == pytest.approx(1e-3)
    assert method == "wall clock"
    assert seen == [number % 4 for number in range(len(seen))] and len(seen) >= 4


def test_host_overhead_is_the_time_of_one_call(spend: Callable[[float], None]) -> None:
    assert host_series(lambda: spend(1e-3), "cpu")() == pytest.approx(1e-3)


def test_the_size_of_the_last_level_cache_is_found() -> None:
    assert 1 << 18 <= CpuClock().cache < 1 << 31


def test_a_call_longer_than_a_series_is_run_once(spend: Callable[[float], None]) -> None:
    seen: list[float] = []
    run, _ = CpuClock().series([lambda: (seen.append(1.0), spend(60.0))])
    seen.clear()
    assert run() == pytest.approx(60.0) and len(seen) == 1
