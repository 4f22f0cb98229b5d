"""Measure one operation at one shape: first its accuracy, then its speed beside its peers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from kernel_builder.measure.accuracy import deviation, fault, poisoned
from kernel_builder.measure.results import COPY, OURS, YARDSTICK, HostOverhead, Point, Row, estimate
from kernel_builder.measure.timing import Call, Clock, Run, host_series, interleaved, sets_needed
from kernel_format.errors import MeasureError


class Function(Protocol):
    """An operation of the package or of a peer."""

    def __call__(self, *inputs: Any) -> Any: ...


Tensors = Sequence[torch.Tensor]

# How many times eager's error is allowed. Peers get more, since some round where models do not.
_ALLOWED = 1.1
ALLOWED_PEERS = 4.0


class Case:
    """A workload at one shape, with the tensors of one call.

    Attributes:
        inputs: The inputs of the call, on the workload's device and of its dtype.
        trained: The inputs that get a gradient; empty in a forward pass.
        grads: The gradients of the floating-point results, of their shapes; empty in a forward pass.
        result_sizes: The bytes of each result, without gradients.
    """

    def __init__(self, workload: Any, passes: str, shape: tuple[int, ...]) -> None:
        self.workload = workload
        self.passes = passes
        self.inputs: Tensors = workload.inputs(*shape)
        self.grads: Tensors = ()
        self.result_sizes: set[int] = set()
        self.trained: Tensors = () if passes == "forward" else workload.trained(*self.inputs)
        for tensor in self.trained:
            tensor.requires_grad_()

    def prepare(self, results: Tensors) -> None:
        """Make the gradients of the results; `results` has their shapes and dtypes."""
        self.result_sizes = {result.numel() * result.element_size() for result in results}
        if self.passes != "forward":
            self.grads = [torch.rand_like(result.detach()) for result in differentiable(results)]

    def restore(self, given: Tensors) -> None:
        """Restore the values of the inputs: some peers write gradients over them."""
        with torch.no_grad():
            for tensor, values in zip(self.inputs, given, strict=True):
                tensor.copy_(values)

    def results(self, function: Function) -> Tensors:
        """Return everything that a timed call computes: its results, its gradients, or both."""
        return self._results(function, self.inputs, self.grads)

    def exact(self) -> Tensors:
        """Return the same as `results`, computed by the eager code in float64."""
        inputs = [given.detach().double() if given.is_floating_point() else given for given in self.inputs]
        return self._results(self.workload.eager, inputs, [grad.double() for grad in self.grads])

    def _results(self, function: Function, inputs: Tensors, grads: Tensors) -> Tensors:
        if self.passes == "forward":
            return tensors(function(*inputs))
        trained = self.workload.trained(*inputs)
        for tensor in trained:
            tensor.requires_grad_()
        results = tensors(function(*inputs))
        gradients = torch.autograd.grad(differentiable(results), trained, grads)
        return [*(result.detach() for result in results), *gradients] if self.passes != "backward" else [*gradients]

    def call(self, function: Function) -> Call:
        """Return the call to time. For a backward pass the forward pass has run, and its graph is kept."""
        if self.passes == "forward":
            return lambda: function(*self.inputs)
        if self.passes == "forward + backward":
            return lambda: torch.autograd.grad(
                differentiable(tensors(function(*self.inputs))), self.trained, self.grads
            )
        results = differentiable(tensors(function(*self.inputs)))
        return lambda: torch.autograd.grad(results, self.trained, self.grads, retain_graph=True)

    def moved(self, results: Tensors) -> int:
        """Return how many bytes a call must read and write.

        Each tensor counts once, even if several inputs share one gradient.

        Args:
            results: Everything that the call computes, as `results` returns it.
        """
        if self.passes == "forward":
            return size([*self.inputs, *results])
        saved = self.workload.saved(*self.inputs)
        if self.passes == "backward":
            return size([*saved, *self.grads, *results])
        forward, backward = results[: -len(self.trained)], results[-len(self.trained) :]
        return size([*self.inputs, *forward]) + size([*saved, *self.grads, *backward])


def tensors(result: Any) -> Tensors:
    """Return the tensors of a result as a sequence."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def differentiable(results: Tensors) -> Tensors:
    """Return the results that get a gradient: those of a floating-point dtype."""
    return [result for result in results if result.is_floating_point()]


def size(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the elements of tensors; shared storage and expanded dimensions count once."""
    each = {}
    for tensor in tensors:
        elements = 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements *= length if stride else 1
        each[tensor.data_ptr(), elements] = elements * tensor.element_size()
    return sum(each.values())


def measure(workload: Any, row: Row, functions: Mapping[str, Function], clock: Clock, rounds: int) -> None:
    """Measure one point and fill in its row. If the kernel's own result is wrong, nothing is timed.

    Args:
        row: Names the point; receives bytes, errors, faults and times (seconds).
        functions: Implementation name -> function; the kernel is `OURS`.
        clock: Times series of calls on the device; the caller is in its context.
    """
    point = row.point
    cases = [Case(workload, point.passes, point.shape)]
    returned = tensors(workload.eager(*cases[0].inputs))
    cases[0].prepare(returned)
    _check(cases[0], row, functions)
    if OURS in row.faults:
        return
    row.bytes = cases[0].moved(cases[0].results(functions[OURS]))
    row.sets = sets_needed(clock.cache, row.bytes)
    for _ in range(row.sets - 1):
        cases.append(Case(workload, point.passes, point.shape))
        cases[-1].prepare(returned)
    del returned
    runs: dict[str, Run] = {}
    runs[COPY], row.methods[COPY] = copies(row.bytes, row.sets, workload.device, clock)
    for name, function in functions.items():
        if name in row.faults:
            continue
        try:
            run, row.methods[name] = clock.series([case.call(function) for case in cases])
            run()
            runs[name] = run
        except Exception as problem:
            row.faults[name] = _message(problem, name, row.point, workload.device)
    if OURS not in runs:
        return
    samples = interleaved(runs, rounds)
    for name, taken in samples.items():
        row.times[name] = estimate(taken)
        row.shares[name] = estimate([copy / time for copy, time in zip(samples[COPY], taken, strict=True)])
        row.ratios[name] = estimate([time / ours for ours, time in zip(samples[OURS], taken, strict=True)])


def measure_host(workload: Any, host: HostOverhead, functions: Mapping[str, Function], rounds: int) -> None:
    """Measure the host overhead of a call (seconds of CPU time, launch included) and fill it in."""
    case = Case(workload, host.point.passes, host.point.shape)
    case.prepare(tensors(workload.eager(*case.inputs)))
    runs: dict[str, Run] = {YARDSTICK: host_series(_yardstick(host.point.passes, workload.device), workload.device)}
    for name, function in functions.items():
        try:
            runs[name] = host_series(case.call(function), workload.device)
            runs[name]()
        except Exception as problem:
            host.faults[name] = _message(problem, name, host.point, workload.device)
            runs.pop(name, None)
    # Backward passes run in this thread. In autograd's own they also pay for waking a core, which on a virtual machine
    # costs several times as much as the computation.
    with torch.autograd.set_multithreading_enabled(False):
        host.times = {name: estimate(taken) for name, taken in interleaved(runs, rounds).items()}


def _yardstick(passes: str, device: str) -> Call:
    """Return a call of `F.rms_norm` on a small tensor, the unit in which host overhead is compared."""
    x = torch.rand(1, 64, dtype=torch.bfloat16, device=device, requires_grad=passes != "forward")
    weight = torch.rand(64, dtype=torch.bfloat16, device=device, requires_grad=passes != "forward")
    grad = torch.rand_like(x)
    if passes == "forward":
        return lambda: torch.nn.functional.rms_norm(x, (64,), weight)
    return lambda: torch.autograd.grad(torch.nn.functional.rms_norm(x, (64,), weight), (x, weight), grad)


def _check(case: Case, row: Row, functions: Mapping[str, Function]) -> None:
    """Record the implementations whose results are wrong, or that raise.

    The kernel comes before every other implementation, and its memory is poisoned: a result that it leaves unwritten
    could otherwise have the content of another's, which was freed before.
    """
    given = [tensor.detach().clone() for tensor in case.inputs]
    names = sorted(functions, key=lambda name: name != OURS)
    results: dict[str, Tensors] = {}
    if OURS in functions:
        _call(case, row, functions, OURS, given, results)
    exact = case.exact()
    eager = [deviation(*pair) for pair in zip(case.results(case.workload.eager), exact, strict=True)]
    case.restore(given)
    for name in names:
        if name not in results and name not in row.faults:
            _call(case, row, functions, name, given, results)
        if name not in results:
            continue
        deviations = [deviation(*pair) for pair in zip(results.pop(name), exact, strict=False)]
        if all(math.isfinite(each.relative) for each in deviations):
            row.errors[name] = deviations
        if reason := fault(deviations, eager, _ALLOWED if name == OURS else ALLOWED_PEERS):
            row.faults.setdefault(name, reason)


def _call(
    case: Case, row: Row, functions: Mapping[str, Function], name: str, given: Tensors, results: dict[str, Tensors]
) -> None:
    """Add the results of an implementation in poisoned memory, or record why there are none; restore the inputs."""
    sizes = {tensor.numel() * tensor.element_size() for tensor in given} | case.result_sizes
    try:
        with poisoned(case.workload.device, sizes):
            results[name] = case.results(functions[name])
        # Some peers write gradients over their inputs, and are measured all the same.
        if name == OURS and not all(map(_equal, case.inputs, given)):
            row.faults[name] = "it changes its inputs"
    except Exception as problem:
        row.faults[name] = _message(problem, name, row.point, case.workload.device)
    finally:
        case.restore(given)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits where they are numbers, and NaN in the same places."""
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _message(problem: Exception, name: str, point: Point, device: str) -> str:
    """Return an exception's message as one line."""
    lines = str(problem).strip().splitlines()
    message = f"{type(problem).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise MeasureError(
                f"{name} made the GPU fail: {message}",
                where=str(point),
                hint="find the access with compute-sanitizer, or the call with CUDA_LAUNCH_BLOCKING=1",
            ) from problem
    return message


def copies(moved: int, sets: int, device: str, clock: Clock) -> tuple[Run, str]:
    """Return a run of device-to-device copies that move `moved` bytes, half read and half written: the copy speed.

    The driver's copy is up to 20 % slower for sizes that are no multiple of 4096 bytes, and 25 % slower for some above
    450 MB (H100). So a multiple is copied, and the time is scaled to `moved`; and where an element-wise kernel moves
    the bytes faster, it sets the copy speed.
    """
    half = moved // 2
    size = half // 4096 * 4096 or half
    pairs = []
    for _ in range(sets):
        source = torch.empty(size, dtype=torch.uint8, device=device).random_(256)
        pairs.append((source, torch.empty_like(source)))
    run, method = clock.series([partial(target.copy_, source) for source, target in pairs])
    if device == "cuda" and size % 4096 == 0:
        words = [(source.view(torch.bfloat16), target.view(torch.bfloat16)) for source, target in pairs]
        plain, _ = clock.series([partial(torch.neg, source, out=target) for source, target in words])
        run = min(run, plain, key=lambda candidate: min(candidate() for _ in range(3)))
    return lambda: run() * half / size, method
