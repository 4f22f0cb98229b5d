"""The clock for GPUs; skipped without one."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

from kernel_builder.measure.timing import CudaClock

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def tensors() -> list[torch.Tensor]:
    return [torch.randn(64 << 20, device="cuda") for _ in range(4)]


def test_graphs_and_events_agree(tensors: list[torch.Tensor]) -> None:
    clock = CudaClock()
    with clock.context():
        calls = [lambda t=t: t.neg() for t in tensors]
        by_graph, method = clock.series(calls)
        assert method == "graph"
        seconds = by_graph()
        moved = 2 * 4 * tensors[0].numel()
        assert 1e11 < moved / seconds < 2e13
        assert clock._events(calls)() == pytest.approx(seconds, rel=0.15)


def test_a_call_that_cannot_be_captured_is_timed_by_events(tensors: list[torch.Tensor]) -> None:
    clock = CudaClock()
    with clock.context():
        run, method = clock.series([lambda t=t: t.sum().item() for t in tensors])
        assert method == "events" and run() > 0
        assert torch.randn(3, device="cuda").isfinite().all()
        assert clock.series([lambda t=t: t.neg() for t in tensors])[1] == "graph"


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
