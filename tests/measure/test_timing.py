from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from kernel_builder.measure.timing import MOST_SETS, CpuClock, host_series, interleaved, on_one_core, sets_needed


def test_sets_exceed_the_cache_four_times() -> None:
    for moved in (1 << 10, 1 << 20, 1 << 25, 1 << 30):
        sets = sets_needed(50 << 20, moved)
        assert sets >= 2
        assert sets * moved > 4 * (50 << 20) or sets == MOST_SETS


def test_rounds_take_turns_in_going_first() -> None:
    order: list[str] = []

    def run(name: str, seconds: float) -> Callable[[], float]:
        return lambda: order.append(name) or seconds  # type: ignore[func-returns-value]

    samples = interleaved({name: run(name, ord(name)) for name in "abc"}, 4)
    assert samples == {name: [ord(name)] * 4 for name in "abc"}
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"


def test_calls_take_sets_in_turn_and_their_time_is_that_of_one() -> None:
    seen: list[int] = []

    def call(number: int) -> Callable[[], None]:
        def one() -> None:
            seen.append(number)
            time.sleep(1e-3)

        return one

    run, method = CpuClock().series([call(number) for number in range(4)])
    seen.clear()
    assert 1e-3 <= run() < 5e-3
    assert method == "wall clock"
    assert seen == [number % 4 for number in range(len(seen))] and len(seen) >= 4


def test_the_cost_of_the_host_is_that_of_one_call() -> None:
    assert 1e-3 <= host_series(lambda: time.sleep(1e-3), "cpu")() < 5e-3


def test_one_core_is_for_all_threads_and_for_a_while() -> None:
    before = os.sched_getaffinity(0)
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(2)]
    threads[0].start()
    with on_one_core():
        threads[1].start()
        within = {frozenset(os.sched_getaffinity(thread.native_id or 0)) for thread in threads}
        within.add(frozenset(os.sched_getaffinity(0)))
    after = [os.sched_getaffinity(thread.native_id or 0) for thread in threads]
    done.set()
    assert len(within) == 1 and len(next(iter(within))) == 1
    assert [before, *after] == [os.sched_getaffinity(0), before, before]


def test_this_machine_has_a_cache() -> None:
    assert 1 << 18 <= CpuClock().cache < 1 << 31


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_series_runs_at_least_once(seconds: float) -> None:
    run, _ = CpuClock().series([lambda: time.sleep(seconds)])
    assert run() >= seconds
