"""Run a benchmark: load a built kernel, measure every selected point, and save the report after each."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import kernels
import torch

from kernel_builder.config.project_files import read_project
from kernel_builder.measure import workloads as declarations
from kernel_builder.measure.case import Function, measure, measure_host
from kernel_builder.measure.compiled import compile_ahead, compiled
from kernel_builder.measure.results import COMPILE, COPY, EAGER, OURS, BenchmarkReport, HostOverhead, Point, Row
from kernel_builder.measure.selection import operations, points
from kernel_builder.measure.timing import clock
from kernel_builder.progress import Progress, Silent
from kernel_format.errors import ConfigError, VariantError

# The directory of the naive kernel in a project, and its name as a peer: it has no backward pass.
NAIVE = "naive"
_PACKAGES = ("torch", "kernels", "triton", "liger-kernel", "quack-kernels")


@dataclass(frozen=True)
class BenchmarkRequest:
    """The selection and the settings of a measurement."""

    project: Path
    command: str = ""
    """The command line to record, so that a reader can repeat the run."""
    device: str | None = None
    """"cuda" or "cpu"; None for "cuda" if there is a GPU, else "cpu"."""
    operations: Sequence[str] = ()
    shapes: Sequence[str] = ()
    dtypes: Sequence[str] = ("bfloat16",)
    against: Sequence[str] | None = None
    """Names of peers; None for eager PyTorch, torch.compile and every peer that the project declares."""
    rounds: int = 21
    """Samples of each time."""
    only: str | None = None
    """"device" leaves out host overhead; "host" measures nothing else, without correctness; None does both."""
    json: Path | None = None
    """Where to save the report after each row."""


_SILENT = Silent()


def run(request: BenchmarkRequest, progress: Progress = _SILENT) -> BenchmarkReport:
    """Measure every selected point, and the host overhead of every selected operation."""
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = operations(declarations.load(request.project), request.operations)
    todo = points(chosen, device, shapes=request.shapes, dtypes=request.dtypes)
    kernel = _load(request.project, device)
    peers = _Peers(request, chosen, device)
    report = _report(request, device, kernel, peers.absent)
    costs = _host_points(todo, chosen) if request.only != "device" else []
    todo = todo if request.only != "host" else []
    jobs = len(os.sched_getaffinity(0))
    if peers.compile and jobs > 1:
        ahead = [*costs, *todo]
        for done, _ in enumerate(compile_ahead(request.project, ahead, peers.importable, device, jobs), 1):
            progress.advance("compiling peers", done, len(ahead))
    gc.freeze()  # otherwise every graph capture collects garbage over all imported modules
    timer = clock(device)
    for done, point in enumerate(todo, 1):
        row = Row(point)
        with _functions(chosen, point, kernel, device, peers) as (workload, functions):
            measure(workload, row, functions, timer, request.rounds)
        report.rows.append(row)
        progress.advance("measuring", done, len(todo), detail=f"{point}: {_verdict(row)}")
        if request.json:
            report.save(request.json)
    for point in costs:
        host = HostOverhead(point)
        with _functions(chosen, point, kernel, device, peers) as (workload, functions):
            measure_host(workload, host, functions, request.rounds)
        report.hosts.append(host)
        if request.json:
            report.save(request.json)
    return report


def _verdict(row: Row) -> str:
    if OURS in row.faults:
        return f"WRONG, not timed: {row.faults[OURS]}"
    if OURS not in row.times:
        return "not timed"
    return f"{row.times[OURS].median * 1e6:.3g} us, a copy {row.times[COPY].median * 1e6:.3g} us"


class _Peers:
    """The implementations that the kernel is measured against.

    Attributes:
        eager, compile: Whether eager PyTorch and torch.compile are among them.
        declared: Operation -> name -> function, of the peers that the project declares.
        importable: The names of declared peers that can be imported.
        naive: The naive kernel, if it was loaded.
        absent: Name -> why a declared peer cannot be imported, or how the naive kernel is built.
    """

    def __init__(self, request: BenchmarkRequest, chosen: Mapping[str, type[Any]], device: str) -> None:
        naive = [NAIVE] if any(hasattr(workload, NAIVE) for workload in chosen.values()) else []
        declared = dict.fromkeys(name for workload in chosen.values() for name in workload.peers)
        names = [*naive, EAGER, *declared, COMPILE]
        for name in request.against or ():
            if name not in names:
                raise ConfigError(f"{name!r} is none of {', '.join(names)}", where="--against")
        wanted = names if request.against is None else request.against
        self.eager = EAGER in wanted
        self.compile = COMPILE in wanted
        self.absent: dict[str, str] = {}
        self.naive: Any = self._load_naive(request.project / NAIVE, device) if NAIVE in wanted else None
        self.declared: dict[str, dict[str, Function]] = {operation: {} for operation in chosen}
        self.importable: set[str] = set()
        for operation, workload in chosen.items():
            for name, factory in workload.peers.items():
                if name not in wanted:
                    continue
                try:
                    self.declared[operation][name] = factory()
                    self.importable.add(name)
                except Exception as error:  # a library may raise anything on a machine that it does not support
                    self.absent[name] = f"{type(error).__name__}: {error}"

    def _load_naive(self, project: Path, device: str) -> Any:
        if device not in map(str, read_project(project).backends):
            return None
        try:
            return _load(project, device)
        except VariantError as error:
            self.absent[NAIVE] = f"not built; {error.hint}"
            return None


@contextlib.contextmanager
def _functions(
    chosen: Mapping[str, type[Any]], point: Point, kernel: Any, device: str, peers: _Peers
) -> Iterator[tuple[Any, dict[str, Function]]]:
    """Make the workload of a point, and the functions that compute its operation, by name."""
    torch.manual_seed(42)
    workload = declarations.make(chosen[point.operation], kernel, device, point.dtype)
    functions: dict[str, Function] = {OURS: workload.ours}
    if peers.naive and point.passes == "forward" and hasattr(workload, NAIVE):
        workload.naive_kernel = peers.naive
        functions[NAIVE] = workload.naive
    if peers.eager:
        functions[EAGER] = workload.eager
    functions |= peers.declared[point.operation]
    with contextlib.ExitStack() as stack:
        if peers.compile:
            functions[COMPILE] = stack.enter_context(compiled(workload.eager))
        yield workload, functions
    functions.clear()
    gc.collect()  # frees CUDA graphs, and with them this point's tensors
    if device == "cuda":
        torch.cuda.empty_cache()


def _host_points(todo: Sequence[Point], chosen: Mapping[str, type[Any]]) -> list[Point]:
    """Return a forward point for each selected operation, and one with gradients if those are selected."""
    selected: dict[Point, None] = {}
    for point in todo:
        passes = "forward" if point.passes == "forward" else "forward + backward"
        selected[Point(point.operation, passes, chosen[point.operation].small, point.dtype)] = None
    return list(selected)


def _load(project: Path, device: str) -> Any:
    try:
        return kernels.get_local_kernel(project.resolve(), backend=device)
    except (FileNotFoundError, ValueError) as error:
        raise VariantError(
            f"has no build for {device} that this machine can load: {str(error).strip().splitlines()[0].rstrip(':')}",
            where=str(project),
            hint=f"kernel-builder build {project} --backend {device}",
        ) from error


def _report(request: BenchmarkRequest, device: str, kernel: Any, absent: dict[str, str]) -> BenchmarkReport:
    package = Path(kernel.__file__).parent
    build = json.loads((package / "metadata.json").read_text(encoding="utf-8"))
    size = sum(file.stat().st_size for file in package.rglob("*") if file.is_file() and file.suffix != ".pyc")
    source = (build.get("provenance") or {}).get("kernel") or {}
    commit = str(source.get("commit", "unknown"))[:12] + ("-dirty" if source.get("dirty") else "")
    return BenchmarkReport(
        kernel=build["name"],
        variant=package.name,
        build={"id": build.get("id"), "commit": commit, "bytes": size},
        device=device,
        command=request.command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=_machine(device),
        rounds=request.rounds,
        absent=absent,
    )


def _machine(device: str) -> dict[str, Any]:
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    hardware: dict[str, Any] = {"cpu": model[1] if model else platform.machine()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(None)
        hardware |= {"gpu": properties.name, "driver": _driver(), "cuda": torch.version.cuda}
    else:
        hardware["threads"] = torch.get_num_threads()
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {**hardware, "system": platform.platform(), "python": platform.python_version(), "packages": versions}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return None
    return done.stdout.split("\n", 1)[0].strip() or None
