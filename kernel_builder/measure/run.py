"""A run: loads a built kernel, measures every place that was asked for, and keeps what it has after each."""

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

from kernel_builder.errors import ConfigError, VariantError
from kernel_builder.measure import workloads as declarations
from kernel_builder.measure.case import Function, measure, measure_host
from kernel_builder.measure.compiled import compile_ahead, compiled
from kernel_builder.measure.results import COMPILE, EAGER, OURS, Host, Place, Report, Row
from kernel_builder.measure.selection import operations, places
from kernel_builder.measure.timing import clock

_PACKAGES = ("torch", "kernels", "triton", "liger-kernel", "quack-kernels")


@dataclass(frozen=True)
class Request:
    """What to measure, and how."""

    project: Path
    command: str = ""
    """How a reader can run this again."""
    device: str | None = None
    """None: "cuda" where there is a GPU, else "cpu"."""
    operations: Sequence[str] = ()
    passes: Sequence[str] = ()
    shapes: Sequence[str] = ()
    dtypes: Sequence[str] = ("bfloat16",)
    against: Sequence[str] | None = None
    """None: every peer that the project declares, eager PyTorch and torch.compile."""
    rounds: int = 21
    only: str | None = None
    """"device": not what calls cost the host; "host": nothing else, and no correctness. None: both."""
    jobs: int | None = None
    """Processes that compile for torch.compile, before anything is timed. None: as many as there are processors."""
    json: Path | None = None


class Listener:
    """Is told how a run goes on. This one says nothing."""

    def compiled(self, done: int, total: int) -> None:
        """torch.compile is done with so many places."""

    def measured(self, done: int, total: int, row: Row) -> None:
        """A row is complete."""


def run(request: Request, listener: Listener) -> Report:
    """Measures all that was asked for.

    Raises:
        ConfigError: If the project declares no workloads, or not what was asked for.
        MeasureError: If the GPU fails. What was measured before is kept.
        VariantError: If the project has no build that this machine can load.
    """
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = operations(declarations.load(request.project), request.operations)
    todo = places(chosen, device, passes=request.passes, shapes=request.shapes, dtypes=request.dtypes)
    kernel = _load(request.project, device)
    peers = _Peers(chosen, request.against)
    report = _report(request, device, kernel, peers.absent)
    costs = _host_places(todo, chosen) if request.only != "device" else []
    todo = todo if request.only != "host" else []
    jobs = request.jobs or len(os.sched_getaffinity(0))
    if peers.compile and jobs > 1:
        ahead = [*costs, *todo]
        for done, _ in enumerate(compile_ahead(request.project, ahead, peers.found, device, jobs), 1):
            listener.compiled(done, len(ahead))
    gc.freeze()  # else each graph that begins would go through all that has been imported
    timer = clock(device)
    for done, place in enumerate(todo, 1):
        row = Row(place)
        with _functions(chosen, place, kernel, device, peers) as (workload, functions):
            measure(workload, row, functions, timer, request.rounds)
        report.rows.append(row)
        listener.measured(done, len(todo), row)
        _keep(report, request)
    for place in costs:
        host = Host(place)
        with _functions(chosen, place, kernel, device, peers) as (workload, functions):
            measure_host(workload, host, functions, request.rounds)
        report.hosts.append(host)
        _keep(report, request)
    return report


class _Peers:
    """The implementations that the kernel is measured against."""

    def __init__(self, chosen: Mapping[str, type[Any]], against: Sequence[str] | None) -> None:
        names = [EAGER, *dict.fromkeys(name for workload in chosen.values() for name in workload.peers), COMPILE]
        for name in against or ():
            if name not in names:
                raise ConfigError(f"{name!r} is none of {', '.join(names)}", where="--against")
        wanted = names if against is None else against
        self.eager = EAGER in wanted
        self.compile = COMPILE in wanted
        self.absent: dict[str, str] = {}
        """Why those that cannot be imported here cannot."""
        self.declared: dict[str, dict[str, Function]] = {operation: {} for operation in chosen}
        """The others, by operation and name."""
        self.found: set[str] = set()
        """The names of these."""
        for operation, workload in chosen.items():
            for name, factory in workload.peers.items():
                if name not in wanted:
                    continue
                try:
                    self.declared[operation][name] = factory()
                    self.found.add(name)
                except Exception as error:  # whatever a library does where it cannot work
                    self.absent[name] = f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _functions(
    chosen: Mapping[str, type[Any]], place: Place, kernel: Any, device: str, peers: _Peers
) -> Iterator[tuple[Any, dict[str, Function]]]:
    """A workload, and all that computes its operation, by name."""
    torch.manual_seed(42)
    workload = declarations.make(chosen[place.operation], kernel, device, place.dtype)
    functions: dict[str, Function] = {OURS: workload.ours}
    if peers.eager:
        functions[EAGER] = workload.eager
    functions |= peers.declared[place.operation]
    with contextlib.ExitStack() as stack:
        if peers.compile:
            functions[COMPILE] = stack.enter_context(compiled(workload.eager))
        yield workload, functions
    functions.clear()
    gc.collect()  # graphs, and with them the tensors of this place
    if device == "cuda":
        torch.cuda.empty_cache()


def _host_places(todo: Sequence[Place], chosen: Mapping[str, type[Any]]) -> list[Place]:
    """Of each operation that is measured, a call without gradient, and one with it if gradients are measured."""
    found: dict[Place, None] = {}
    for place in todo:
        passes = "forward" if place.passes == "forward" else "forward + backward"
        found[Place(place.operation, passes, chosen[place.operation].small, place.dtype)] = None
    return list(found)


def _keep(report: Report, request: Request) -> None:
    if request.json:
        report.save(request.json)


def _load(project: Path, device: str) -> Any:
    try:
        return kernels.get_local_kernel(project.resolve(), backend=device)
    except (FileNotFoundError, ValueError) as error:
        raise VariantError(
            f"has no build for {device} that this machine can load: {str(error).strip().splitlines()[0]}",
            where=str(project),
            hint=f"kernel-builder build {project} --backend {device}",
        ) from error


def _report(request: Request, device: str, kernel: Any, absent: dict[str, str]) -> Report:
    package = Path(kernel.__file__).parent
    build = json.loads((package / "metadata.json").read_text(encoding="utf-8"))
    return Report(
        kernel=build["name"],
        variant=package.name,
        build={"id": build.get("id"), "provenance": build.get("provenance")},
        device=device,
        command=request.command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=_machine(device),
        rounds=request.rounds,
        absent=absent,
    )


def _machine(device: str) -> dict[str, Any]:
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    found: dict[str, Any] = {"cpu": model[1] if model else platform.machine()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(None)
        found |= {"gpu": properties.name, "driver": _driver(), "cuda": torch.version.cuda}
    else:
        found["threads"] = torch.get_num_threads()
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {**found, "system": platform.platform(), "python": platform.python_version(), "packages": versions}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return None
    return done.stdout.split("\n", 1)[0].strip() or None
