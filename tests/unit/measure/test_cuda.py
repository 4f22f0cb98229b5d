"""The clock for GPUs; skipped without one."""

from __future__ import annotations

import weakref

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


def test_each_call_writes_to_memory_of_its_own(tensors: list[torch.Tensor]) -> None:
    clock = CudaClock()
    written: list[int] = []

    def call(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.neg()
        written.append(result.data_ptr())
        return result

    with clock.context():
        clock.series([lambda t=t: call(t) for t in tensors])
    # The last calls are those of the graph. No call writes to the memory of the previous ones.
    last = written[-2 * len(tensors) :]
    assert len(set(last[: len(tensors)])) == len(set(last[len(tensors) :])) == len(tensors)


def test_a_run_keeps_the_tensors_of_its_graph_alive() -> None:
    clock = CudaClock()
    tensors = [torch.randn(1 << 20, device="cuda") for _ in range(3)]
    kept = [weakref.ref(tensor) for tensor in tensors]
    with clock.context():
        run, _ = clock.series([lambda t=t: t.neg() for t in tensors])
        del tensors
        torch.cuda.empty_cache()
        assert run() > 0
    assert all(reference() is not None for reference in kept)


def test_a_backward_pass_alone_can_be_captured(tensors: list[torch.Tensor]) -> None:
    clock = CudaClock()
    with clock.context():
        inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        results = [tensor.sigmoid() for tensor in inputs]
        calls = [
            lambda i=i, r=r, g=g: torch.autograd.grad(r, i, g, retain_graph=True)
            for i, r, g in zip(inputs, results, tensors, strict=True)
        ]
        assert clock.series(calls)[1] == "graph"
