"""Measures one operation at one shape: first whether its results are right, then how fast it is beside its peers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from kernel_builder.errors import MeasureError
from kernel_builder.measure.accuracy import error, fault
from kernel_builder.measure.results import COPY, OURS, Host, Place, Row
from kernel_builder.measure.statistics import estimate
from kernel_builder.measure.timing import Call, Clock, Run, host_series, interleaved, on_one_core, sets_needed

Function = Callable[..., Any]
Tensors = Sequence[torch.Tensor]

_ALLOWED = 1.1  # times eager's error, for the kernel
_ALLOWED_PEERS = 4.0  # who may round where models do not


class Case:
    """A workload at a shape, with the tensors of one call."""

    def __init__(self, workload: Any, passes: str, shape: tuple[int, ...]) -> None:
        self.workload = workload
        self.passes = passes
        self.inputs: Tensors = workload.inputs(*shape)
        self.grads: Tensors = ()
        self.trained: Tensors = () if passes == "forward" else workload.trained(*self.inputs)
        for tensor in self.trained:
            tensor.requires_grad_()

    def prepare(self, results: Tensors) -> None:
        """Makes the gradients of what a call returns, where it returns tensors like these."""
        if self.passes != "forward":
            self.grads = [torch.rand_like(result.detach()) for result in results]

    def restore(self, given: Tensors) -> None:
        """Gives the inputs their values again: there are gradients that are written over them."""
        with torch.no_grad():
            for tensor, values in zip(self.inputs, given, strict=True):
                tensor.copy_(values)

    def results(self, function: Function) -> Tensors:
        """Everything that a call computes: what it returns, and the gradients, as far as they are timed."""
        return self._results(function, self.inputs, self.grads)

    def exact(self) -> Tensors:
        """The same, by eager code in float64."""
        inputs = [tensor.detach().double() for tensor in self.inputs]
        return self._results(self.workload.eager, inputs, [grad.double() for grad in self.grads])

    def _results(self, function: Function, inputs: Tensors, grads: Tensors) -> Tensors:
        if self.passes == "forward":
            return tensors(function(*inputs))
        trained = self.workload.trained(*inputs)
        for tensor in trained:
            tensor.requires_grad_()
        results = tensors(function(*inputs))
        gradients = torch.autograd.grad(results, trained, grads)
        return [*(result.detach() for result in results), *gradients] if self.passes != "backward" else [*gradients]

    def call(self, function: Function) -> Call:
        """One call as it is timed."""
        if self.passes == "forward":
            return lambda: function(*self.inputs)
        if self.passes == "forward + backward":
            return lambda: torch.autograd.grad(tensors(function(*self.inputs)), self.trained, self.grads)
        results = tensors(function(*self.inputs))
        return lambda: torch.autograd.grad(results, self.trained, self.grads, retain_graph=True)

    def moved(self, results: Tensors) -> int:
        """Bytes that a call must read and write, where `results` is everything that it computes.

        Each tensor counts once, also a gradient that is passed on as it came, or for several inputs.
        """
        if self.passes == "forward":
            return size([*self.inputs, *results])
        saved = self.workload.saved(*self.inputs)
        if self.passes == "backward":
            return size([*saved, *self.grads, *results])
        forward, backward = results[: len(self.grads)], results[len(self.grads) :]
        return size([*self.inputs, *forward]) + size([*saved, *self.grads, *backward])


def tensors(result: Any) -> Tensors:
    """The tensors of a result."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def size(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements of tensors, each counted once."""
    each = {}
    for tensor in tensors:
        elements = 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements *= length if stride else 1
        each[tensor.data_ptr(), elements] = elements * tensor.element_size()
    return sum(each.values())


def measure(workload: Any, row: Row, functions: Mapping[str, Function], clock: Clock, rounds: int) -> None:
    """Fills in the row. `functions` has the kernel, by the name of `OURS`, and its peers.

    When the kernel's own result is wrong nothing is timed.
    """
    with clock.here():
        _measure(workload, row, functions, clock, rounds)


def _measure(workload: Any, row: Row, functions: Mapping[str, Function], clock: Clock, rounds: int) -> None:
    place = row.place
    cases = [Case(workload, place.passes, place.shape)]
    returned = tensors(workload.eager(*cases[0].inputs))
    cases[0].prepare(returned)
    _check(cases[0], row, functions)
    if OURS in row.faults:
        return
    row.bytes = cases[0].moved(cases[0].results(functions[OURS]))
    row.sets = sets_needed(clock.cache, row.bytes)
    for _ in range(row.sets - 1):
        cases.append(Case(workload, place.passes, place.shape))
        cases[-1].prepare(returned)
    del returned
    runs: dict[str, Run] = {}
    runs[COPY], row.methods[COPY] = _copies(row.bytes, row.sets, workload.device, clock)
    for name, function in functions.items():
        if name in row.faults:
            continue
        try:
            run, row.methods[name] = clock.series([case.call(function) for case in cases])
            run()
            runs[name] = run
        except Exception as problem:
            row.faults[name] = _said(problem, name, row.place, workload.device)
    if OURS not in runs:
        return
    samples = interleaved(runs, rounds)
    for name, taken in samples.items():
        row.times[name] = estimate(taken)
        row.shares[name] = estimate([copy / one for copy, one in zip(samples[COPY], taken, strict=True)])
        row.ratios[name] = estimate([one / ours for ours, one in zip(samples[OURS], taken, strict=True)])


def measure_host(workload: Any, host: Host, functions: Mapping[str, Function], rounds: int) -> None:
    """Fills in what a call costs the host."""
    case = Case(workload, host.place.passes, host.place.shape)
    case.prepare(tensors(workload.eager(*case.inputs)))
    runs: dict[str, Run] = {}
    for name, function in functions.items():
        try:
            runs[name] = host_series(case.call(function), workload.device)
            runs[name]()
        except Exception as problem:
            host.faults[name] = _said(problem, name, host.place, workload.device)
            runs.pop(name, None)
    # On the CPU the threads of the operations themselves need the other cores.
    with on_one_core() if workload.device == "cuda" else contextlib.nullcontext():
        host.times = {name: estimate(taken) for name, taken in interleaved(runs, rounds).items()}


def _check(case: Case, row: Row, functions: Mapping[str, Function]) -> None:
    """Finds the implementations whose results are wrong, or that fail."""
    exact = case.exact()
    given = [tensor.detach().clone() for tensor in case.inputs]
    eager = [error(*pair) for pair in zip(case.results(case.workload.eager), exact, strict=True)]
    for name, function in functions.items():
        try:
            found = [error(*pair) for pair in zip(case.results(function), exact, strict=False)]
        except Exception as problem:
            row.faults[name] = _said(problem, name, row.place, case.workload.device)
            continue
        finally:
            case.restore(given)
        if all(math.isfinite(one.mean) for one in found):
            row.errors[name] = found
        if reason := fault(found, eager, _ALLOWED if name == OURS else _ALLOWED_PEERS):
            row.faults[name] = reason


def _said(problem: Exception, name: str, place: Place, device: str) -> str:
    """What an exception says, in a line.

    Raises:
        MeasureError: If the GPU will do nothing more for this process, as after an access outside of its memory.
    """
    lines = str(problem).strip().splitlines()
    said = f"{type(problem).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise MeasureError(
                f"{name} has made the GPU fail: {said}",
                where=str(place),
                hint="compute-sanitizer names the access; CUDA_LAUNCH_BLOCKING=1 the call",
            ) from problem
    return said


def _copies(moved: int, sets: int, device: str, clock: Clock) -> tuple[Run, str]:
    """Copies that move as many bytes, half of them read, half of them written.

    The driver of a GPU takes up to a fifth longer for sizes that are no multiple of 4096, and a quarter longer for
    some above 450 megabytes; a floor must not depend on that. So a multiple is copied, the time is that of the whole in
    proportion, and where a plain kernel moves the bytes in less, that kernel is the floor.
    """
    half = moved // 2
    size = half // 4096 * 4096 or half
    pairs = [_pair(size, device) for _ in range(sets)]
    run, method = clock.series([_copy(*pair) for pair in pairs])
    if device == "cuda" and size % 4096 == 0:
        plain, _ = clock.series([_move(*pair) for pair in pairs])
        run = min(run, plain, key=lambda one: min(one() for _ in range(3)))
    return lambda: run() * half / size, method


def _copy(source: torch.Tensor, target: torch.Tensor) -> Call:
    return lambda: target.copy_(source)


def _move(source: torch.Tensor, target: torch.Tensor) -> Call:
    words, to = source.view(torch.bfloat16), target.view(torch.bfloat16)
    return lambda: torch.neg(words, out=to)


def _pair(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(256)
    return source, torch.empty_like(source)
