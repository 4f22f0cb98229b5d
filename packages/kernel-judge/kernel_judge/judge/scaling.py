"""Sizes for this machine: small enough to judge in seconds, and further ones that a candidate has not seen."""

from __future__ import annotations

import os
import random
import resource
import signal
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from kernel_format.errors import ConfigError
from kernel_judge.judge.evaluation import with_tensors, without_tensors
from kernel_judge.judge.reference import Reference
from kernel_tasks import MachineError, Sizes, Task

# Integers below that the constructor depends on are rarely sizes, but widths of convolutions or numbers of groups.
_SMALLEST = 16
_MOST_BYTES = {"cpu": 24 << 20, "cuda": 1 << 30}
_MOST_SECONDS = {"cpu": 8e-3, "cuda": 20e-3}
_TRIES = 20
_LEAST_INPUTS = 8
_CHECK_SECONDS = {"cpu": 10.0, "cuda": 30.0}
_CALLS_AN_INPUT = 6  # the candidate's, eager's, and one in float64, which takes several times as long
_BEYOND = 10  # times these, for a task whose sizes cannot be made smaller
_SLOWEST = 100  # times the seconds, for the smallest workload of a format
_MOST_WORKLOADS, _MOST_TIMED = 24, 4  # of a task with fixed workloads
_Item = TypeVar("_Item")
# Limits of a fork that tests whether a call is small.
_FORK_BYTES, _FORK_SECONDS = 128 << 20, 1.0


def fitted(task: Task, device: str) -> dict[str, Any]:
    """Return the sizes of a task, halved until a call fits the time and memory of a verdict on this device."""
    current = {**task.sizes(), **task.settings.sizes}
    fixed: set[str] = set()
    where = _where(task, current)
    while (cost := _bytes(task, current, where)) is not None and cost > _MOST_BYTES[device]:
        smaller = _halved_once(task, current, fixed, 4, where)
        if smaller is None and cost <= _BEYOND * _MOST_BYTES[device]:
            break
        if smaller is None:
            raise ConfigError(
                f"a call takes {cost >> 20} MiB; the judge has {_MOST_BYTES[device] >> 20} MiB on {device}",
                where=str(task.path),
                hint="assign the sizes at the top level of the file, or set smaller ones in [sizes] of its task.toml",
            )
        current = smaller
    while (seconds := Reference(task, current, None, device, 0).seconds) > _MOST_SECONDS[device]:
        # Small integers only where a call is far too long: they change the problem more than its size.
        least = 2 * _SMALLEST if seconds <= _BEYOND * _MOST_SECONDS[device] else 4
        smaller = _halved_once(task, current, fixed, least, where)
        if smaller is None:
            break
        current = smaller
    return current


def fitting_workloads(task: Task, device: str, seed: int) -> tuple[list[Reference], list[Reference], list[str]]:
    """Return the reference at those of a task's workloads that fit the time and memory of a verdict on this device.

    They are tried from the smallest one on. The first is taken even if it takes much longer than that.

    Returns:
        Also those to time, and notes for the verdict, in sentences.
    """
    ordered = sorted(range(len(task.workloads)), key=lambda number: task.weight(task.workloads[number]))
    taken: list[tuple[int, Reference]] = []
    for number in _spread(ordered, _MOST_WORKLOADS):
        try:
            reference = Reference(task, task.workloads[number], None, device, seed)
        except torch.OutOfMemoryError:
            if not taken:
                raise
            break
        cost = sum(reference.moved(reference.arguments(seed))) / _MOST_BYTES[device]
        if taken and max(cost, reference.seconds / _MOST_SECONDS[device]) > 1:
            break
        if cost > _BEYOND or reference.seconds > _SLOWEST * _MOST_SECONDS[device]:
            most, longest = _BEYOND * _MOST_BYTES[device] >> 20, _SLOWEST * _MOST_SECONDS[device]
            raise MachineError(
                f"its smallest workload takes {int(cost * _MOST_BYTES[device]) >> 20} MiB and "
                f"{reference.seconds:.2g} s; the judge has {most} MiB and {longest:.2g} s for a call on {device}",
                where=str(task.path),
            )
        taken.append((number, reference))
    timed = [reference for number, reference in taken if number < task.timed] or [taken[-1][1]]
    timed = _spread(timed, _MOST_TIMED)
    others = [reference for _, reference in taken if reference not in timed]
    sentences = []
    if len(taken) < len(task.workloads):
        sentences.append(f"{len(taken)} of the task's {len(task.workloads)} workloads were checked on this device.")
    return timed + others, timed, sentences


def _spread(items: Sequence[_Item], most: int) -> list[_Item]:
    """Return at most so many of the items, evenly, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def affordable(inputs: int, references: Sequence[Reference]) -> int:
    """Return how many inputs can be drawn and checked in the time of a verdict: a few, and one a shape, at least."""
    seconds = [reference.drawing_seconds + _CALLS_AN_INPUT * reference.seconds for reference in references]
    most = _CHECK_SECONDS[references[0].device] / max(statistics.fmean(seconds), 1e-6)
    return min(inputs, max(_LEAST_INPUTS, len(references), int(most)))


def unseen(task: Task, sizes: Sizes, number: int, choice: random.Random) -> list[dict[str, Any]]:
    """Return other sizes, at most as large, with which the reference works.

    Sizes that the constructor does not depend on are changed, as another batch or sequence length in use; if there is
    none, any.
    """
    where = _where(task, sizes)
    for free, least in ((True, 2), (False, _SMALLEST)):
        large = [name for name, value in sizes.items() if _largest(value) >= least]
        if names := [name for name in large if _changes(task, sizes, name, where, free=free)]:
            break
    chosen: list[dict[str, Any]] = []
    for _ in range(_TRIES if names else 0):
        some = choice.sample(names, choice.randint(1, len(names)))
        other = _changed(sizes, some, lambda size: choice.randint(max(1, size // 3), size))
        if other != sizes and other not in chosen and _bytes(task, other, where) is not None:
            chosen.append(other)
        if len(chosen) == number:
            break
    return chosen


def cut_lengths(task: Task, sizes: Sizes, device: str, number: int, choice: random.Random) -> list[dict[int, int]]:
    """Return other lengths for the inputs of a task without sizes that can be changed, as `Reference` takes them.

    Equal lengths are changed together, wherever they are, if the reference accepts it. With integers among the inputs
    only the first dimensions are cut: the integers may be places in another one.
    """
    given = Reference(task, sizes, None, device, 0).arguments(0)
    dimensions = None if all(tensor.is_floating_point() for tensor in given.tensors) else 1
    lengths = {length for tensor in given.tensors for length in tensor.shape[:dimensions] if length > 1}
    fixed = {length for tensor in given.tensors for length in tensor.shape[1:] if dimensions}
    free = [
        length for length in sorted(lengths - fixed) if _accepts(task, sizes, device, {length: max(1, length * 2 // 3)})
    ]
    chosen: list[dict[int, int]] = []
    for _ in range(_TRIES if free else 0):
        some = choice.sample(free, choice.randint(1, len(free)))
        other = {length: choice.randint(max(1, length // 3), length - 1) for length in some}
        if other not in chosen and _accepts(task, sizes, device, other):
            chosen.append(other)
        if len(chosen) == number:
            break
    return chosen


def _accepts(task: Task, sizes: Sizes, device: str, lengths: dict[int, int]) -> bool:
    try:
        Reference(task, sizes, None, device, 0, lengths=lengths)
    except ConfigError:
        return False
    return True


def _changed(sizes: Sizes, names: Sequence[str], change: Callable[[int], int]) -> dict[str, Any]:
    """Return sizes of which some are changed, of tuples each number."""
    some = {name: value for name, value in sizes.items() if name in names}
    return {**sizes, **{k: tuple(map(change, v)) if isinstance(v, tuple) else change(v) for k, v in some.items()}}


def _changes(task: Task, sizes: Sizes, name: str, where: str, *, free: bool) -> bool:
    """Return whether the inputs depend on a size and, if it must be free, the constructor does not."""
    other = _changed(sizes, [name], lambda size: size - 1)
    try:
        before, after = _layout(task, sizes, where), _layout(task, other, where)
    except Exception:
        return False
    return before[1] != after[1] and (before[0] == after[0]) is free


def _layout(task: Task, sizes: Sizes, where: str) -> tuple[str, list[Any]]:
    problem = task.problem(sizes)
    with torch.device(where):
        tensors: list[torch.Tensor] = []
        without_tensors(problem.get_inputs(), tensors)
    return repr(problem.get_init_inputs()), [tuple(tensor.shape) for tensor in tensors]


def _where(task: Task, sizes: Sizes) -> str:
    """Return the device on which to see the shapes of a call: "cpu" if it takes little there, or else "meta".

    "meta" allocates nothing, but Torch imports its compiler for it, which takes 2 s. A fork finds out: it can be ended,
    and memory that it cannot get is no harm to this process.
    """
    process = os.fork()
    if process == 0:
        is_little = False
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, _FORK_SECONDS)
            used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_DATA, (used + _FORK_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
            torch.set_num_threads(1)  # the others are not in a fork
            cost = _bytes(task, sizes, "cpu")
            is_little = cost is not None and cost <= _MOST_BYTES["cpu"]
        finally:
            os._exit(not is_little)
    return "cpu" if os.waitpid(process, 0)[1] == 0 else "meta"


def _bytes(task: Task, sizes: Sizes, where: str) -> int | None:
    """Return the bytes of inputs, parameters and results on a device; None if the model refuses."""
    problem = task.problem(sizes)
    try:
        tensors: list[torch.Tensor] = []
        with torch.device(where), torch.no_grad():
            model = problem.Model(*problem.get_init_inputs())
            skeleton = without_tensors(problem.get_inputs(), tensors)
            tensors = [tensor.to(where) for tensor in tensors]
            without_tensors(model(*with_tensors(skeleton, tensors)), tensors)
        tensors += model.state_dict().values()
    except Exception:
        return None
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _halved_once(task: Task, sizes: Sizes, fixed: set[str], least: int, where: str) -> dict[str, Any] | None:
    """Return sizes that the model accepts, with the largest halved if it is at least `least`.

    Sizes that the model does not accept smaller are added to `fixed`.
    """
    while True:
        free = {name: value for name, value in sizes.items() if name not in fixed}
        largest = max(map(_largest, free.values()), default=0)
        if largest < least:
            return None
        names = [name for name, value in free.items() if _largest(value) == largest]
        # All of them, since sizes of one value often must be equal, then each alone.
        for some in (names, *([name] for name in names)):
            other = _changed(sizes, some, partial(_halved, largest))
            if _bytes(task, other, where) is not None:
                return other
        fixed.update(names)


def _largest(value: Any) -> int:
    return max(value) if isinstance(value, tuple) else int(value)


def _halved(largest: int, size: int) -> int:
    return size // 2 if size == largest else size
