"""Compares a model with itself accelerated: errors and times of both, and which of them is worth keeping."""

import copy
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from . import kernel_set

Check = Union[Mapping[str, Any], tuple[Any, ...], Callable[[nn.Module], Any]]

# The accelerated model may have this many times the eager model's error.
_ALLOWED = 1.1
# Smaller errors are float32's rounding in another order of the sums.
_NEGLIGIBLE = 1e-6
# Without a reference: so many roundings of the output's dtype may the two models differ. Eager models in bfloat16
# differ from float32 by up to 7.
_ROUNDINGS = 16


@dataclass
class Comparison:
    """A model and the same model accelerated, on the same inputs.

    Attributes:
        kept: "accelerated" or "eager": the model that the check decided for.
        reason: Why.
        eager_ms: Median time of the model as it was, in milliseconds.
        accelerated_ms: Median time of the accelerated model, in milliseconds; None if it failed.
        reference: The dtype of the model that both were compared with, or None: see `no_reference`.
        no_reference: Why there is no reference. Both are then compared with each other only.
        eager_error: Relative error of the model as it was: norm of the difference, divided by that of the reference.
        accelerated_error: Relative error of the accelerated model.
        difference: Relative difference of the two; None if the outputs have no floating-point numbers.
    """

    kept: str
    reason: str
    eager_ms: float
    accelerated_ms: Optional[float] = None
    reference: Optional[str] = None
    no_reference: Optional[str] = None
    eager_error: Optional[float] = None
    accelerated_error: Optional[float] = None
    difference: Optional[float] = None

    def __str__(self) -> str:
        lines = [f"{self.kept} kept: {self.reason}"]
        for name, ms, error in (
            ("eager", self.eager_ms, self.eager_error),
            ("accelerated", self.accelerated_ms, self.accelerated_error),
        ):
            if ms is not None:
                of = "" if error is None else f", relative error {error:.2e} to {self.reference}"
                lines.append(f"{name:11}  {ms:.3f} ms{of}")
        if self.no_reference is not None:
            lines.append(f"compared with each other only: {self.no_reference}")
        if self.difference is not None:
            lines.append(f"relative difference of the two: {self.difference:.2e}")
        return "\n".join(lines)


def compare(model: nn.Module, check: Check, accelerate: Callable[[], None], restore: Callable[[], None]) -> Comparison:
    """Run `model` as it is and accelerated, and leave it in the better of the two states.

    Args:
        model: A model that is not accelerated.
        check: Its keyword arguments, its positional arguments, or a function that runs the model that it gets.
        accelerate: Accelerates `model`.
        restore: Undoes it.
    """

    def run() -> Any:
        return _run(model, check)

    eager = _outputs(model, check)
    milliseconds = _milliseconds(run)
    expected, reference, no_reference = _reference(model, check)
    accelerate()
    try:
        run()  # CUDA graphs are captured at the second call, and replayed from the third on
        run()
        ours = _outputs(model, check)
        eager_ms, accelerated_ms = _times(run, milliseconds, accelerate, restore)
    except Exception as error:
        restore()
        reason = f"accelerated, the model fails: {type(error).__name__}: {error}"
        return Comparison("eager", reason, milliseconds)

    result = Comparison("accelerated", "", eager_ms, accelerated_ms, reference, no_reference)
    if eager:
        result.difference = _relative_difference(ours, eager)
    if expected is not None and expected:
        result.eager_error = _relative_difference(eager, expected)
        result.accelerated_error = _relative_difference(ours, expected)
    _judge(result, eager)
    if result.kept == "eager":
        restore()
    return result


def _judge(result: Comparison, outputs: Sequence[Tensor]) -> None:
    result.kept = "eager"
    if result.eager_error is not None and result.accelerated_error is not None:
        allowed = max(_ALLOWED * result.eager_error, _NEGLIGIBLE)
        if not result.accelerated_error <= allowed:
            result.reason = f"accelerated, its error exceeds {_ALLOWED} times the eager model's"
            return
    elif result.difference is not None:
        allowed = _ROUNDINGS * max(torch.finfo(output.dtype).eps for output in outputs)
        if not result.difference <= allowed:
            result.reason = f"accelerated, its outputs differ by more than {allowed:.1e}"
            return
    if result.accelerated_ms > result.eager_ms:
        result.reason = f"accelerated, it takes {result.accelerated_ms / result.eager_ms:.2f} times as long"
        return
    result.kept = "accelerated"
    result.reason = f"it takes {result.accelerated_ms / result.eager_ms:.2f} of the eager model's time"


# --- running ----------------------------------------------------------------------------------------------------------


def _run(model: nn.Module, check: Check) -> Any:
    with torch.no_grad():
        if isinstance(check, Mapping):
            return model(**_fresh(check))
        if isinstance(check, tuple):
            return model(*_fresh(check))
        return check(model)


def _outputs(model: nn.Module, check: Check) -> list[Tensor]:
    """Return the floating-point tensors of a run. Each run draws the same random numbers."""
    devices = [torch.cuda.current_device()] if kernel_set.DEVICE == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        return [tensor.clone() for tensor in _tensors(_run(model, check)) if tensor.is_floating_point()]


def _fresh(value: Any) -> Any:
    """Return inputs for one run: a model changes the caches that it gets, and not the tensors."""
    if value is None or isinstance(value, (Tensor, str, bool, int, float, torch.dtype, torch.device)):
        return value
    if isinstance(value, dict):
        return {key: _fresh(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fresh(item) for item in value)
    return copy.deepcopy(value)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _tensors(item)
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
    elif is_dataclass(output):
        for item in fields(output):
            yield from _tensors(getattr(output, item.name))


# --- times ------------------------------------------------------------------------------------------------------------


def _times(
    run: Callable[[], Any],
    milliseconds: float,
    accelerate: Callable[[], None],
    restore: Callable[[], None],
    rounds: int = 3,
) -> tuple[float, float]:
    """Return the median times of the eager and the accelerated model, which is how the model is left.

    They take turns, so that a change of the clock rate or of the machine's load meets both.
    """
    runs = max(1, min(20, math.ceil(200 * rounds / 3 / milliseconds)))
    eager: list[float] = []
    accelerated: list[float] = []
    for _ in range(rounds):
        restore()
        run()
        run()
        eager += (_milliseconds(run) for _ in range(runs))
        accelerate()
        run()
        run()
        accelerated += (_milliseconds(run) for _ in range(runs))
    return statistics.median(eager), statistics.median(accelerated)


def _milliseconds(run: Callable[[], Any]) -> float:
    if kernel_set.DEVICE == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1000


# --- accuracy ---------------------------------------------------------------------------------------------------------


def _relative_difference(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    squares = norms = 0.0
    for x, y in zip(tensors, expected):
        squares += (x.double() - y.double()).square().sum().item()
        norms += y.double().square().sum().item()
    return math.sqrt(squares / norms) if norms else math.sqrt(squares)


def _reference(model: nn.Module, check: Check) -> tuple[Optional[list[Tensor]], Optional[str], Optional[str]]:
    """Return the outputs of the model in a wider dtype, the name of the dtype, and why there are none."""
    parameters = [p for p in (*model.parameters(), *model.buffers()) if p.is_floating_point()]
    if any(p.device.type == "meta" for p in parameters):
        return None, None, "some of the model's weights are offloaded"
    dtype = torch.float64 if all(p.dtype == torch.float32 for p in parameters) else torch.float32
    name = str(dtype).removeprefix("torch.")
    # Half as much again for the forward's results.
    if 1.5 * dtype.itemsize * sum(p.numel() for p in parameters) > _free_memory(parameters):
        return None, None, f"a {name} copy of the model does not fit in memory"
    try:
        wide = nn.Module.to(copy.deepcopy(model), dtype)  # diffusers' own `to` warns
        wide.register_forward_pre_hook(
            lambda _, args, kwargs: (_widened(args, dtype), _widened(kwargs, dtype)), with_kwargs=True
        )
        return _outputs(wide, check), name, None
    except Exception as error:
        return None, None, f"a {name} copy of the model cannot run: {type(error).__name__}: {error}"


def _widened(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _widened(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_widened(item, dtype) for item in value)
    return value


def _free_memory(tensors: Sequence[Tensor]) -> float:
    if any(tensor.is_cuda for tensor in tensors):
        return torch.cuda.mem_get_info()[0]
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return math.inf
