"""Measures Triton kernels that were compiled ahead of time beside the same kernels compiled just in time, on a GPU.

    python benchmarks/triton_aot.py PROJECT... --json triton-aot.json

A PROJECT is a directory like examples/triton/rms_norm, built here: `build/` has its package for the machine's CUDA
and its Python-only package. The machine needs Torch and the Triton release that aot.toml names, and no network.

First calls are measured in fresh processes, just in time with an empty cache of Triton. Host times are of bursts of
calls with small tensors. Device times are of CUDA graphs with tensors that are not in a cache; the two take turns.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from recording import ROOT, write
from triton_results import AHEAD, HEAD, JIT, cells

sys.path.insert(0, str(ROOT))
from kernel_builder.measure.timing import clock, host_series, interleaved, sets_needed

_ROUNDS = 21
_PROCESSES = 3
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operation:
    """A launch function of a project.

    Attributes:
        inputs: Returns the arguments for a size.
        reference: Returns the results in float64.
        small: The size for first calls and host times.
        large: The size for device times.
        others: More sizes for comparisons of results.
    """

    project: str
    name: str
    inputs: Callable[..., tuple[Any, ...]]
    reference: Callable[..., Sequence[torch.Tensor]]
    small: tuple[int, ...]
    large: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]


# --- inputs and references --------------------------------------------------------------------------------------------


def _random(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda").to(dtype)


def _norm_inputs(rows: int, n: int) -> tuple[Any, ...]:
    return _random(rows, n), _random(n), 1e-6


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Tensors:
    rstd = torch.rsqrt(x.double().square().mean(-1) + eps)
    return x.double() * rstd[:, None] * weight.double(), rstd


def _norm_backward_inputs(rows: int, n: int) -> tuple[Any, ...]:
    x, weight, eps = _norm_inputs(rows, n)
    return _random(rows, n), x, weight, _norm(x, weight, eps)[1].float(), 16


def _norm_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, step: int) -> Tensors:
    normed = x.double() * rstd.double()[:, None]
    scaled = grad.double() * weight.double()
    mean = (scaled * normed).mean(-1, keepdim=True)
    parts = [part.sum(0) for part in (grad.double() * normed).split(step)]
    return (scaled - normed * mean) * rstd.double()[:, None], torch.stack(parts)


def _loss_inputs(rows: int, n: int) -> tuple[Any, ...]:
    target = torch.randint(n, (rows,), device="cuda")
    target[:: max(rows // 4, 2)] = -100
    return _random(rows, n), target, -100


def _loss(logits: torch.Tensor, target: torch.Tensor, ignored: int) -> Tensors:
    wide = logits.double()
    return F.cross_entropy(wide, target, ignore_index=ignored, reduction="none"), wide.logsumexp(-1)


def _loss_backward_inputs(rows: int, n: int) -> tuple[Any, ...]:
    logits, target, ignored = _loss_inputs(rows, n)
    return _random(rows, dtype=torch.float32), logits, target, _loss(logits, target, ignored)[1].float(), ignored


def _loss_backward(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, ignored: int
) -> Tensors:
    one_hot = F.one_hot(target.clamp(min=0), logits.shape[1])
    return ((grad * (target != ignored)).double()[:, None] * (logits.double().softmax(-1) - one_hot),)


def _linear_inputs(m: int, n: int, k: int) -> tuple[Any, ...]:
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
    return _random(m, k), weight, torch.rand(n, device="cuda") / 127


def _linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Tensors:
    return (x.double() @ (weight.double() * scale.double()[:, None]).T,)


def _attention_inputs(batch: int, heads: int, key_heads: int, m: int, n: int, dim: int, causal: int) -> tuple[Any, ...]:
    keys = (batch, key_heads, n, dim)
    return _random(batch, heads, m, dim), _random(*keys), _random(*keys), dim**-0.5, bool(causal)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> Tensors:
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (tensor.double().repeat_interleave(groups, 1) for tensor in (k, v))
    scores = q.double() @ wide_k.transpose(-1, -2) * scale
    if causal:
        m, n = scores.shape[-2:]
        scores.masked_fill_(~torch.ones(m, n, dtype=torch.bool, device="cuda").tril(n - m), -torch.inf)
    return scores.softmax(-1) @ wide_v, scores.logsumexp(-1)


def _step_inputs(batch: int, channels: int, n: int) -> tuple[Any, ...]:
    state, a = _random(batch, channels, n, dtype=torch.float32), -torch.rand(channels, n, device="cuda")
    x, dt, b, c = (_random(batch, size) for size in (channels, channels, n, n))
    bias, d = (_random(channels, dtype=torch.float32) for _ in range(2))
    return state, x, dt, bias, a, b, c, d


def _step(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
) -> Tensors:
    step = F.softplus(dt.double() + bias)
    new = state.double() * torch.exp(a.double() * step[..., None]) + (step * x)[..., None] * b.double()[:, None]
    return (new * c.double()[:, None]).sum(-1) + x.double() * d, new


def _routing_inputs(tokens: int, experts: int, top_k: int) -> tuple[Any, ...]:
    # Logits of a row differ, so that the order of experts is determined.
    logits = torch.rand(tokens, experts, device="cuda").argsort(-1) / 16
    return logits.to(torch.bfloat16 if experts <= 256 else torch.float32), top_k


def _routing(logits: torch.Tensor, top_k: int) -> Tensors:
    values, chosen = logits.double().topk(top_k)
    return values.softmax(-1), chosen.double(), chosen.flatten().bincount(minlength=logits.shape[1]).double()


OPERATIONS = (
    Operation(
        "rms_norm",
        "rms_norm_forward",
        _norm_inputs,
        _norm,
        (8, 4096),
        (4096, 4096),
        ((64, 768), (100, 1000), (33, 1536), (1, 8192)),
    ),
    Operation(
        "rms_norm",
        "rms_norm_backward",
        _norm_backward_inputs,
        _norm_backward,
        (2, 4096),
        (4096, 4096),
        ((64, 768), (100, 1000), (33, 1536)),
    ),
    Operation(
        "cross_entropy",
        "cross_entropy_forward",
        _loss_inputs,
        _loss,
        (8, 4096),
        (1024, 128256),
        ((16, 32000), (7, 1000), (33, 50257)),
    ),
    Operation(
        "cross_entropy",
        "cross_entropy_backward",
        _loss_backward_inputs,
        _loss_backward,
        (8, 4096),
        (1024, 128256),
        ((16, 32000), (7, 1000), (33, 50257)),
    ),
    Operation(
        "int8_matmul",
        "int8_linear",
        _linear_inputs,
        _linear,
        (16, 1024, 512),
        (4096, 4096, 4096),
        ((1, 4096, 4096), (16, 4096, 14336), (100, 768, 1000)),
    ),
    Operation(
        "attention",
        "attention",
        _attention_inputs,
        _attention,
        (1, 8, 2, 64, 64, 64, 1),
        (2, 32, 8, 4096, 4096, 128, 1),
        ((1, 8, 8, 512, 512, 64, 0), (2, 8, 2, 100, 333, 128, 0), (2, 8, 2, 100, 333, 64, 1), (1, 4, 4, 1, 77, 128, 1)),
    ),
    Operation(
        "state_update",
        "state_update",
        _step_inputs,
        _step,
        (1, 1024, 16),
        (64, 8192, 128),
        ((3, 1000, 16), (8, 4096, 16), (2, 100, 128)),
    ),
    Operation(
        "moe_routing",
        "route",
        _routing_inputs,
        _routing,
        (64, 64, 2),
        (16384, 128, 8),
        ((100, 60, 6), (1000, 256, 4), (33, 8, 2)),
    ),
)


# --- packages ---------------------------------------------------------------------------------------------------------


def _load(project: Path, how: str) -> Any:
    """Import the package of a project that was compiled ahead of time, or the Python-only one."""
    cuda = "".join((torch.version.cuda or "").split("."))
    variants = sorted(path for path in (project / "build").iterdir() if (path / "metadata.json").exists())
    if how == AHEAD:
        found = [path for path in variants if f"-cu{cuda}-" in path.name]
    else:
        found = [path for path in variants if path.name == "torch-cuda"]
    if len(found) != 1:
        raise SystemExit(f"{project}/build has {len(found)} packages {how} for CUDA {cuda}; expected one")
    name = f"{project.name}_{'ahead' if how == AHEAD else 'jit'}"
    spec = importlib.util.spec_from_file_location(
        name, found[0] / "__init__.py", submodule_search_locations=[str(found[0])]
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _function(project: Path, operation: Operation, how: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(_load(project, how), operation.name)
    return function


# --- measurements -----------------------------------------------------------------------------------------------------


def first_call(project: Path, operation: Operation, how: str) -> dict[str, Any]:
    """Measure the import of the package and its first call.

    Just in time, Triton is imported before, so that it is not counted; ahead of time, an import of it fails.
    """
    torch.manual_seed(0)
    inputs = operation.inputs(*operation.small)
    if how == JIT:
        importlib.import_module("triton")
    else:
        sys.modules["triton"] = None  # type: ignore[assignment]  # an import of it fails
    torch.cuda.synchronize()
    started = time.perf_counter()
    function = _function(project, operation, how)
    loaded = time.perf_counter()
    function(*inputs)
    torch.cuda.synchronize()
    called = time.perf_counter()
    function(*inputs)
    torch.cuda.synchronize()
    second = time.perf_counter()
    return {
        "load-ms": (loaded - started) * 1e3,
        "first-ms": (called - loaded) * 1e3,
        "second-ms": (second - called) * 1e3,
        "triton-imported": sys.modules.get("triton") is not None,
    }


def first_calls(project: Path, operation: Operation) -> dict[str, Any]:
    """Return the medians of fresh processes, by how the kernel was compiled."""
    results = {}
    for how in (AHEAD, JIT):
        found = []
        for _ in range(_PROCESSES):
            with tempfile.TemporaryDirectory() as cache:
                command = [sys.executable, __file__, str(project), "--first", operation.name, how]
                environment = {**os.environ, "TRITON_CACHE_DIR": cache}
                run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                found.append(json.loads(run.stdout.splitlines()[-1]))
        results[how] = {key: statistics.median(entry[key] for entry in found) for key in found[0]}
        results[how]["triton-imported"] = any(entry["triton-imported"] for entry in found)
    return results


def _results(function: Callable[..., Any], inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the results, and the inputs that may have been changed."""
    copies = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in inputs)
    results = function(*copies)
    results = list(results) if isinstance(results, tuple) else [results]
    return results + [value for value in copies if isinstance(value, torch.Tensor)][:1]


def compare(operation: Operation, functions: dict[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """Compare the results of all sizes: bit by bit, and with float64."""
    rows = []
    for size in (operation.small, operation.large, *operation.others):
        torch.manual_seed(1)
        inputs = operation.inputs(*size)
        ahead, jit = (_results(functions[how], inputs) for how in (AHEAD, JIT))
        equal = all(
            a.dtype == b.dtype and bool((a.view(_BITS[a.itemsize]) == b.view(_BITS[b.itemsize])).all())
            for a, b in zip(ahead, jit, strict=True)
        )
        row: dict[str, Any] = {"size": size, "equal": equal}
        if size != operation.large:  # its float64 does not fit
            expected = operation.reference(*inputs)
            row["error"] = max(_error(a, b) for a, b in zip(ahead, expected, strict=False))
        rows.append(row)
        del ahead, jit, inputs
    return rows


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error, relative to the largest expected value."""
    return float((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def host_times(operation: Operation, functions: dict[str, Callable[..., Any]], rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of a call on the host, a sample for each round."""
    inputs = operation.inputs(*operation.small)
    runs = {how: host_series(lambda call=functions[how]: call(*inputs), "cuda") for how in (AHEAD, JIT)}
    return {how: [second * 1e6 for second in taken] for how, taken in interleaved(runs, rounds).items()}


def device_times(operation: Operation, functions: dict[str, Callable[..., Any]], rounds: int) -> dict[str, Any]:
    """Return the microseconds of a call on the device, a sample for each round, and the method."""
    timer = clock("cuda")
    inputs = operation.inputs(*operation.large)
    moved = sum(value.nbytes for value in inputs if isinstance(value, torch.Tensor))
    sets = [inputs] + [operation.inputs(*operation.large) for _ in range(sets_needed(timer.cache, moved) - 1)]
    with timer.context():
        runs, methods = {}, set()
        for how in (AHEAD, JIT):
            calls = [lambda call=functions[how], values=values: call(*values) for values in sets]
            runs[how], method = timer.series(calls)
            methods.add(method)
        taken = interleaved(runs, rounds)
    return {"method": sorted(methods), **{how: [second * 1e6 for second in times] for how, times in taken.items()}}


# --- report -----------------------------------------------------------------------------------------------------------


def measure(project: Path, operation: Operation, rounds: int, *, first: bool) -> dict[str, Any]:
    """Return all figures of an operation."""
    report: dict[str, Any] = {}
    if first:
        report["first"] = first_calls(project, operation)
    functions = {how: _function(project, operation, how) for how in (AHEAD, JIT)}
    report["results"] = compare(operation, functions)
    report["host-us"] = host_times(operation, functions, rounds)
    report["device-us"] = device_times(operation, functions, rounds)
    torch.cuda.empty_cache()
    return report


def text_table(table: list[list[str]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


def main() -> None:
    """Measure the operations of the projects, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("projects", type=Path, nargs="+", metavar="PROJECT", help="A project, with its build/.")
    parser.add_argument("--operation", action="append", help="Only this operation; may be repeated.")
    parser.add_argument("--json", type=Path, help="Write the results to this file.")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="Samples of each time.")
    parser.add_argument("--no-first", action="store_true", help="Leave out first calls, which need fresh processes.")
    parser.add_argument("--commit", default="unknown", help="The commit to record.")
    parser.add_argument("--first", nargs=2, metavar=("OPERATION", "HOW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first:
        (operation,) = [operation for operation in OPERATIONS if operation.name == options.first[0]]
        print(json.dumps(first_call(options.projects[0], operation, options.first[1])))
        return
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    triton = importlib.import_module("triton").__version__
    device = torch.cuda.get_device_name()
    report: dict[str, Any] = {
        "machine": {"device": device, "torch": torch.__version__, "triton": triton, "python": sys.version.split()[0]},
        "commit": options.commit,
        "operations": {},
    }
    for project in options.projects:
        for operation in OPERATIONS:
            if operation.project != project.name or (options.operation and operation.name not in options.operation):
                continue
            result = measure(project.resolve(), operation, options.rounds, first=not options.no_first)
            report["operations"][operation.name] = result
            print("\n".join(text_table([list(HEAD), *cells({operation.name: result})])), flush=True)
            if options.json:
                write(options.json, report)
    print("\n".join(text_table([list(HEAD), *cells(report["operations"])])))


if __name__ == "__main__":
    main()
