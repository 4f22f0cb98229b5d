"""Run a benchmark: load a built kernel, measure every selected point, and save the report after each."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import multiprocessing
import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import kernels
import torch

from kernel_builder.config.project_files import read_project
from kernel_builder.measure import workloads
from kernel_builder.measure.case import Case, Function, measure, measure_host, tensors
from kernel_builder.measure.results import COMPILE, COPY, EAGER, OURS, BenchmarkReport, HostOverhead, Point, Row
from kernel_builder.measure.timing import clock
from kernel_builder.measure.workloads import load, make
from kernel_builder.progress import Progress
from kernel_builder.version import first_line, installed
from kernel_format.errors import ConfigError, VariantError

# The directory of the naive kernel in a project, and its name as a peer: it has no backward pass.
NAIVE = "naive"
_PACKAGES = ("torch", "kernels", "triton", "liger-kernel", "quack-kernels")
_SILENT = Progress()
# The implementations of an operation: the naive kernel's package, a peer's function, or None for eager and compile.
Peers = Mapping[str, Any]


def run(
    project: Path,
    *,
    device: str | None = None,
    operations: Sequence[str] = (),
    shapes: Sequence[str] = (),
    dtypes: Sequence[str] = ("bfloat16",),
    against: Sequence[str] | None = None,
    rounds: int = 21,
    only: str | None = None,
    command: str = "",
    json_file: Path | None = None,
    progress: Progress = _SILENT,
) -> BenchmarkReport:
    """Measure every selected point, and the host overhead of every selected operation.

    Args:
        project: The directory of a built project.
        device: "cuda" or "cpu"; None for "cuda" if there is a GPU, else "cpu".
        operations: The selection, with `shapes` and `dtypes`, as `workloads.points` describes it.
        against: Names of peers; None for eager PyTorch, torch.compile and every peer that the project declares.
        only: "device" leaves out host overhead; "host" measures nothing else, without correctness; None does both.
        command: The command line to record, so that a reader can repeat the run.
        json_file: Where to save the report after each row.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = workloads.selected(workloads.load(project), operations)
    todo = workloads.points(chosen, device, shapes=shapes, dtypes=dtypes)
    kernel = _load(project, device)
    absent: dict[str, str] = {}
    peers = _peers(project, chosen, against, device, absent)
    report = _report(kernel, device, command, rounds, absent)
    costs = _host_points(todo, chosen) if only != "device" else []
    todo = todo if only != "host" else []
    jobs = len(os.sched_getaffinity(0))
    names = {name for each in peers.values() for name in each}
    if COMPILE in names and jobs > 1:
        ahead = [*costs, *todo]
        progress.advance("compiling peers", 0, len(ahead))
        for done, _ in enumerate(compile_ahead(project, ahead, names, device, jobs), 1):
            progress.advance("compiling peers", done, len(ahead))
    gc.freeze()  # otherwise every graph capture collects garbage over all imported modules
    timer = clock(device)
    for done, point in enumerate([*todo, *costs], 1):
        torch.manual_seed(42)
        workload = workloads.make(chosen[point.operation], kernel, device, point.dtype)
        with _functions(workload, point, peers[point.operation]) as functions:
            if done <= len(todo):
                report.rows.append(row := Row(point))
                with timer.context():
                    measure(workload, row, functions, timer, rounds)
                progress.advance("measuring", done, len(todo), detail=f"{point}: {_verdict(row)}")
            else:
                report.hosts.append(host := HostOverhead(point))
                measure_host(workload, host, functions, rounds)
        gc.collect()  # frees CUDA graphs, and with them this point's tensors
        if device == "cuda":
            torch.cuda.empty_cache()
        if json_file:
            report.save(json_file)
    return report


def _verdict(row: Row) -> str:
    if OURS in row.faults:
        return f"WRONG, not timed: {row.faults[OURS]}"
    if OURS not in row.times:
        return "not timed"
    return f"{row.times[OURS].median * 1e6:.3g} us, a copy {row.times[COPY].median * 1e6:.3g} us"


def _peers(
    project: Path, chosen: Mapping[str, type[Any]], against: Sequence[str] | None, device: str, absent: dict[str, str]
) -> dict[str, Peers]:
    """Return operation -> its peers, and add the reason of each peer that cannot be loaded to `absent`."""
    has_naive = any(hasattr(workload, NAIVE) for workload in chosen.values())
    declared = dict.fromkeys(name for workload in chosen.values() for name in workload.peers)
    names = [*([NAIVE] if has_naive else []), EAGER, *declared, COMPILE]
    for name in against or ():
        if name not in names:
            raise ConfigError(f"{name!r} is none of {', '.join(names)}", where="--against")
    wanted = names if against is None else against
    naive = None
    if NAIVE in wanted and device in map(str, read_project(project / NAIVE).backends):
        try:
            naive = _load(project / NAIVE, device)
        except VariantError as error:
            absent[NAIVE] = f"not built; {error.hint}"
    peers: dict[str, Peers] = {}
    for operation, workload in chosen.items():
        own: dict[str, Any] = {NAIVE: naive} if naive and hasattr(workload, NAIVE) else {}
        own |= {EAGER: None} if EAGER in wanted else {}
        for name, factory in workload.peers.items():
            if name in wanted:
                try:
                    own[name] = factory()
                except Exception as error:  # a library may raise anything on a machine that it does not support
                    absent[name] = f"{type(error).__name__}: {error}"
        peers[operation] = own | ({COMPILE: None} if COMPILE in wanted else {})
    return peers


@contextlib.contextmanager
def _functions(workload: Any, point: Point, peers: Peers) -> Iterator[dict[str, Function]]:
    """Yield the functions that compute the operation of a workload, by name."""
    functions: dict[str, Function] = {OURS: workload.ours}
    with contextlib.ExitStack() as stack:
        for name, peer in peers.items():
            if name == EAGER:
                functions[name] = workload.eager
            elif name == COMPILE:
                functions[name] = stack.enter_context(compiled(workload.eager))
            elif name != NAIVE:
                functions[name] = peer
            elif point.passes == "forward":
                workload.naive_kernel = peer
                functions[name] = workload.naive
        yield functions
    functions.clear()


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
        known = [backend.name for backend in read_project(project).backends]
        raise VariantError(
            f"has no build for {device} that this machine can load: {str(error).strip().splitlines()[0].rstrip(':')}",
            where=str(project),
            hint=f"kernel-builder build {project} --backend {device}"
            if device in known
            else f"the project has {', '.join(known)} only: measure on such a machine, or add {device} to build.toml",
        ) from error


def _report(kernel: Any, device: str, command: str, rounds: int, absent: dict[str, str]) -> BenchmarkReport:
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
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=_machine(device),
        rounds=rounds,
        absent=absent,
    )


def _machine(device: str) -> dict[str, Any]:
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    hardware: dict[str, Any] = {"cpu": model[1] if model else platform.machine()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(None)
        driver = first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        hardware |= {"gpu": properties.name, "driver": driver, "cuda": torch.version.cuda}
    else:
        hardware["threads"] = torch.get_num_threads()
    versions = {name: version for name in _PACKAGES if (version := installed(name))}
    return {**hardware, "system": platform.platform(), "python": platform.python_version(), "packages": versions}


@contextlib.contextmanager
def compiled(function: Function) -> Iterator[Function]:
    """Compile a function with torch.compile for the first shape that it is called with."""
    import torch._functorch.config

    torch.compiler.reset()  # otherwise later shapes compile as dynamic ones, or not at all
    # A backward pass is timed many times after one forward pass, so it must not reuse the saved buffers.
    with torch._functorch.config.patch(donated_buffer=False):
        yield torch.compile(function, dynamic=False)


def compile_ahead(
    project: Path, points: Sequence[Point], peers: Collection[str], device: str, jobs: int
) -> Iterator[Point]:
    """Compile the peers for all points in `jobs` processes; yield each point when it is done, even if it failed."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(points)), context, _start)
    try:
        futures = {pool.submit(_compile, project, point, peers, device): point for point in points}
        for future in as_completed(futures):
            yield futures[future]
    finally:
        pool.shutdown(cancel_futures=True)


def _start() -> None:
    # The workers are the parallelism; a further pool in each takes longer to start than to compile.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _compile(project: Path, point: Point, peers: Collection[str], device: str) -> None:
    declared = load(project)[point.operation]
    workload = make(declared, None, device, point.dtype)
    case = Case(workload, point.passes, point.shape)
    with compiled(workload.eager) as function:
        case.prepare(tensors(function(*case.inputs)))
        case.results(function)
    for name, factory in declared.peers.items():
        if name in peers:
            with contextlib.suppress(Exception):  # reported when the point is measured
                case.results(factory())
