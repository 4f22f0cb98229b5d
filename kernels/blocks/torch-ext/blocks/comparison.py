"""Compares a model, or a graph of one, with itself accelerated: errors and times, and which of them to keep."""

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .calls import is_value
from .editing import returns_its_argument
from .kernel_set import DEVICE, off
from .matching import operation, value

Check = Union[bool, Mapping[str, Any], tuple[Any, ...], Callable[[Any], Any]]

_ALLOWED = 1.1  # of the eager model's error
_NEGLIGIBLE = 1e-6  # an error of float32's rounding in another order of the sums
_ROUNDINGS = 16  # of the output's dtype, without a reference: eager models in bfloat16 are within 7 of float32


@dataclass
class Comparison:
    """A model and the same model accelerated, on the same inputs: median times, and norms of relative differences."""

    kept: str  # "accelerated" or "eager": the model that the check decided for
    reason: str  # why
    eager_ms: float
    accelerated_ms: Optional[float] = None  # None if it failed
    reference: Optional[str] = None  # the dtype of the model that both were compared with
    no_reference: Optional[str] = None  # why there is none, so that both are compared with each other only
    eager_error: Optional[float] = None
    accelerated_error: Optional[float] = None
    difference: Optional[float] = None  # of the two; None if the outputs have no floating-point numbers

    def __str__(self) -> str:
        lines = [f"{self.kept} kept: {self.reason}"]
        for name in ("eager", "accelerated"):
            ms, error = getattr(self, f"{name}_ms"), getattr(self, f"{name}_error")
            of = "" if error is None else f", relative error {error:.2e} to {self.reference}"
            lines += [] if ms is None else [f"{name:11}  {ms:.3f} ms{of}"]
        lines += [] if self.no_reference is None else [f"compared with each other only: {self.no_reference}"]
        lines += [] if self.difference is None else [f"relative difference of the two: {self.difference:.2e}"]
        return "\n".join(lines)


def compare(model: nn.Module, check: Check) -> Comparison:
    """Run an accelerated model, and the same model as it was: see `check` of `accelerate`."""
    with off():
        eager = _outputs(model, check)
        expected, reference, no_reference = _reference(model, check)
        eager_times, accelerated_times = [_milliseconds(model, check)], []
    result = Comparison("eager", "", eager_times[0], None, reference, no_reference)
    try:
        for _ in range(2):  # CUDA graphs are captured at the second call, and replayed from the third on
            _run(model, check)
        ours = _outputs(model, check)
        for _ in range(3):  # in turns: a change of the clock rate or of the machine's load meets both
            accelerated_times.append(_milliseconds(model, check))
            with off():
                eager_times.append(_milliseconds(model, check))
    except Exception as error:
        result.reason = f"accelerated, the model fails: {type(error).__name__}: {error}"
        return result
    result.eager_ms, result.accelerated_ms = statistics.median(eager_times), statistics.median(accelerated_times)
    result.difference = _relative_difference(ours, eager) if eager else None
    ratio = result.accelerated_ms / result.eager_ms
    allowed = _ROUNDINGS * max((torch.finfo(output.dtype).eps for output in eager), default=0.0)
    if expected:
        result.eager_error = _relative_difference(eager, expected)
        result.accelerated_error = _relative_difference(ours, expected)
        if not result.accelerated_error <= max(_ALLOWED * result.eager_error, _NEGLIGIBLE):
            result.reason = f"accelerated, its error exceeds {_ALLOWED} times the eager model's"
    elif result.difference is not None and not result.difference <= allowed:
        result.reason = f"accelerated, its outputs differ by more than {allowed:.1e}"
    if not result.reason:
        slower = "eager", f"accelerated, it takes {ratio:.2f} times as long"
        faster = "accelerated", f"it takes {ratio:.2f} of the eager model's time"
        result.kept, result.reason = slower if ratio > 1 else faster
    return result


def compare_graphs(traced: GraphModule, fused: GraphModule, inputs: Sequence[Any]) -> tuple[bool, str]:
    """Return whether a graph with kernels is about as accurate as the traced one on random inputs, and how accurate."""

    def draw(x: Any) -> Any:  # positive, because models take logarithms and roots of some inputs
        if isinstance(x, Tensor) and x.is_floating_point() and not isinstance(x, nn.Parameter):
            return torch.rand_like(x, dtype=torch.float32).to(x.dtype)
        return x.clone() if isinstance(x, Tensor) else x.node.hint if isinstance(x, torch.SymInt) else x

    def run(graph: Interpreter) -> Any:  # returns also inputs, to which the graph may write
        given = _widen([*map(draw, inputs)], torch.float64) if isinstance(graph, _Wide) else [*map(draw, inputs)]
        return graph.run(*given), [x for x, own in zip(given, inputs) if not isinstance(own, nn.Parameter)]

    if any(isinstance(part, GraphModule) for part in fused.children()):  # `fuse` has changed both
        return True, "not checked: the graph has inner graphs, such as checkpoints"
    graphs = Interpreter(traced), Interpreter(fused), _Wide(traced)
    try:
        rows = [*zip(*(_outputs(graph, run) for graph in graphs))]
        errors = [[_relative_difference([x], [exact]) for x in results] for *results, exact in rows]
    except Exception as error:
        return False, f"the check failed: {error!r:.200}"
    ratios = [error / max(traced_error, _NEGLIGIBLE) for traced_error, error in errors]
    text = f"on random inputs, the error is {max(ratios, default=0.0):.2f} times that of the traced graph"
    return all(ratio <= 2 for ratio in ratios), text  # either error varies by a third


class _Wide(Interpreter):
    """Computes a graph in float64: casts of floating-point values change no dtype."""

    def run_node(self, n: Node) -> Any:
        if operation(n) == "cast" and value(n).is_floating_point():  # a copy, unless the model's cast is none
            return self.env[n.args[0]].to(torch.float64, copy=not returns_its_argument(n))
        return _widen(super().run_node(n), torch.float64)


def _widen(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)


def _milliseconds(model: nn.Module, check: Check) -> float:
    """Return the median time of a call, of calls that take a tenth of a second together."""
    times: list[float] = []
    while sum(times) < 0.1:
        start = time.perf_counter()
        _run(model, check)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def _run(model: Any, check: Check) -> Any:
    with torch.no_grad():
        if isinstance(check, (Mapping, tuple)):
            # A model changes the caches that it gets, and not the tensors.
            inputs = tree_map(lambda x: x if isinstance(x, Tensor) or is_value(x) else copy.deepcopy(x), check)
            return model(*inputs) if isinstance(check, tuple) else model(**inputs)
        return check(model)


def _outputs(model: Any, check: Check) -> list[Tensor]:
    """Return the floating-point tensors of a run. Each run draws the same random numbers."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(0)
        tensors = (leaf for leaf in tree_leaves(_run(model, check)) if isinstance(leaf, Tensor))
        return [tensor.clone() for tensor in tensors if tensor.is_floating_point()]


def _relative_difference(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    squares = sum((x.double() - y.double()).square().sum().item() for x, y in zip(tensors, expected))
    norms = sum(y.double().square().sum().item() for y in expected)
    return math.sqrt(squares / (norms or 1.0))


def _reference(model: nn.Module, check: Check) -> tuple[Optional[list[Tensor]], Optional[str], Optional[str]]:
    """Return the outputs of the model in a wider dtype, the name of the dtype, and why there are none."""
    parameters = [p for p in (*model.parameters(), *model.buffers()) if p.is_floating_point()]
    if any(p.device.type == "meta" for p in parameters):
        return None, None, "some of the model's weights are offloaded"
    dtype = torch.float64 if all(p.dtype == torch.float32 for p in parameters) else torch.float32
    name = str(dtype).removeprefix("torch.")
    try:
        wide = nn.Module.to(copy.deepcopy(model), dtype)  # diffusers' own `to` warns
        wide.register_forward_pre_hook(lambda _, *arguments: _widen(arguments, dtype), with_kwargs=True)
        return _outputs(wide, check), name, None
    except Exception as error:
        return None, None, f"a {name} copy of the model cannot run: {type(error).__name__}: {error}"
