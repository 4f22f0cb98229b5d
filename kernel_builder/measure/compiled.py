"""torch.compile as a peer, and compilation ahead of time for it and for every peer that compiles at its first call.

Eager code is compiled for each shape separately, which takes seconds a shape, far longer than measuring it. So worker
processes compile all points in parallel and leave the results in the compilers' caches, where the measuring process
finds them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from kernel_builder.measure.case import Case, Function, tensors
from kernel_builder.measure.results import Point
from kernel_builder.measure.workloads import load, make


@contextlib.contextmanager
def compiled(function: Function) -> Iterator[Function]:
    """Compile a function with torch.compile for the first shape that it is called with."""
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.reset()  # otherwise later shapes compile as dynamic ones, or not at all
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
