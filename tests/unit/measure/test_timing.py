"""How calls are timed, medians and their confidence intervals, and the accuracy of results."""

from __future__ import annotations

import math
import random
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kernel_builder.measure.accuracy import deviation, fault
from kernel_builder.measure.results import Deviation, estimate
from kernel_builder.measure.timing import MOST_SETS, CpuClock, CudaClock, interleaved, sets_needed


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


def test_results_are_wrong_beyond_the_rounding_of_float32() -> None:
    eager = Deviation(2.5e-8, 0.3)
    assert fault([Deviation(5.2e-8, 0.8)], [eager], 1.1) is None
    message = "its error is 1e-07 relative to its norm, and 8.7e-08 is allowed (eager PyTorch: 2.5e-08)"
    assert fault([Deviation(1e-7, 0.8)], [eager], 1.1) == message
    assert fault([Deviation(5.2e-8, 0.9)], [eager], 1.1) is not None


def test_wrong_shapes_and_infinities_deviate_infinitely() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    assert deviation(torch.ones(2, 2), exact) == deviation(exact.float() / 0, exact) == (math.inf, math.inf)
    assert deviation(torch.ones(0), torch.ones(0, dtype=torch.float64)) == (0, 0)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def tensors() -> list[torch.Tensor]:
    return [torch.randn(64 << 20, device="cuda") for _ in range(4)]


@needs_gpu
def test_graphs_and_events_agree(tensors: list[torch.Tensor]) -> None:
    clock = CudaClock()
    with clock.context():
        calls = [lambda t=t: t.neg() for t in tensors]
        by_graph, method = clock.series(calls)
        assert method == "graph"
        seconds = by_graph()
        assert 1e11 < (2 * 4 * tensors[0].numel()) / seconds < 2e13
        assert clock._events(calls)() == pytest.approx(seconds, rel=0.15)


@needs_gpu
def test_a_call_that_cannot_be_captured_is_timed_by_events(tensors: list[torch.Tensor]) -> None:
    clock = CudaClock()
    with clock.context():
        run, method = clock.series([lambda t=t: t.sum().item() for t in tensors])
        assert method == "events" and run() > 0
        assert torch.randn(3, device="cuda").isfinite().all()
        assert clock.series([lambda t=t: t.neg() for t in tensors])[1] == "graph"


@needs_gpu
def test_each_call_writes_to_memory_of_its_own_and_a_run_keeps_its_tensors() -> None:
    clock = CudaClock()
    tensors = [torch.randn(1 << 20, device="cuda").requires_grad_() for _ in range(3)]
    kept, written = [weakref.ref(tensor) for tensor in tensors], []

    def call(result: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(result, tensor, torch.ones_like(tensor), retain_graph=True)
        written.append(gradient.data_ptr())
        return gradient

    with clock.context():
        run, method = clock.series([partial(call, tensor.sigmoid(), tensor) for tensor in tensors])
        del tensors
        torch.cuda.empty_cache()
        assert method == "graph" and run() > 0, "a backward pass alone can be captured"
    assert all(reference() is not None for reference in kept)
    # The last calls are those of the graph. No call writes to the memory of the previous ones.
    assert len(set(written[-3:])) == len(set(written[-6:-3])) == 3
