"""torch.compile as a peer, and compiling ahead for it and for all that compiles at its first call.

Eager code is compiled for each shape by itself. That takes seconds for each, far longer than to measure it. So
processes of their own compile for all places at once, and leave the result in the compilers' caches, where the process
that measures finds it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from kernel_builder.measure.case import Case, tensors
from kernel_builder.measure.results import Place
from kernel_builder.measure.workloads import load, make


@contextlib.contextmanager
def compiled(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A function as torch.compile makes it, for the shape that it is called with first."""
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.reset()  # else the next shape would be compiled for any, or, after some, not at all
    # A gradient is timed many times after one forward pass, so it must not write over what that has left it.
    with torch._functorch.config.patch(donated_buffer=False):
        yield torch.compile(function, dynamic=False)


def compile_ahead(
    project: Path, places: Sequence[Place], peers: Collection[str], device: str, jobs: int
) -> Iterator[Place]:
    """Has the peers compile for all places. Yields each when it is done, also where something fails."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(places)), context, _start)
    try:
        futures = {pool.submit(_compile, project, place, peers, device): place for place in places}
        for future in as_completed(futures):
            yield futures[future]
    finally:
        pool.shutdown(cancel_futures=True)


def _start() -> None:
    # The processes are parallel enough; a pool in each of them takes longer to start than to compile.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _compile(project: Path, place: Place, peers: Collection[str], device: str) -> None:
    declared = load(project)[place.operation]
    workload = make(declared, None, device, place.dtype)
    case = Case(workload, place.passes, place.shape)
    with compiled(workload.eager) as function:
        case.prepare(tensors(function(*case.inputs)))
        case.results(function)
    for name, factory in declared.peers.items():
        if name in peers:
            with contextlib.suppress(Exception):  # it is told where it is measured
                case.results(factory())
