"""The judge of a search: that of this machine, or the machines of a Ray cluster.

Agents, the log and `best/` stay on this machine. Ray places each judging on a node with a free GPU, or, in a cluster
without GPUs, spreads them over the nodes. The lock of the device is taken there, too: searches that do not use Ray
respect it.
"""

from __future__ import annotations

import io
import socket
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernel_format.errors import ToolchainError
from kernel_judge.search.local_judge import Judge, Judged, LocalJudge
from kernel_sandbox.programs import root_directory

_CONNECT_SECONDS = 10


@contextmanager
def open_judge(settings: Mapping[str, Any], task: Path, is_stopping: Callable[[], bool]) -> Iterator[Judge]:
    """Yield the judge of a search.

    Args:
        settings: Of `SearchRequest.judge_settings`: "command", "seconds" and "ray".
        is_stopping: Asked often; True stops the judge on this machine.
    """
    command, seconds = tuple(settings["command"]), settings["seconds"]
    if settings["ray"] is None:
        yield LocalJudge(task, seconds=seconds, command=command, is_stopping=is_stopping).judge
        return
    with _ray_judge(settings["ray"], task, seconds=seconds, command=command) as judge:
        yield judge


@contextmanager
def _ray_judge(address: str, task: Path, *, seconds: float, command: Sequence[str]) -> Iterator[Judge]:
    """Connect to a cluster, and leave it at the end."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ToolchainError(
            "Ray is not installed", where="--ray", hint="pip install torch-kernel-judge[ray]"
        ) from error
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if host and port.isdigit():  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        with root_directory():  # Ray's processes import modules of the current one
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ToolchainError(
            f"there is no Ray cluster at {address}: {str(error).splitlines()[0]}",
            where="--ray",
            hint="start one with `ray start --head`, and give the address that it prints",
        ) from error
    try:
        gpus = ray.cluster_resources().get("GPU", 0)
        options = {"num_gpus": 1} if gpus else {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        # Without retries: a candidate that takes its node down must not take the next one.
        remote: Any = ray.remote(max_retries=0, **options)(judge_packed)
        packed = _packed(task)

        def judge(candidate: Path) -> Judged:
            try:
                judged: Judged = ray.get(remote.remote(_packed(candidate), packed, seconds, command))
            except ray.exceptions.RayError as error:
                return Judged(None, f"the node that judged has failed: {str(error).splitlines()[0]}", 0.0)
            return judged

        yield judge
    finally:
        ray.shutdown()


def judge_packed(candidate: bytes, task: bytes, seconds: float, command: Sequence[str]) -> Judged:
    """Judge a packed candidate on this node."""
    with tempfile.TemporaryDirectory() as scratch:
        judge = LocalJudge(_unpacked(task, Path(scratch, "task")), seconds=seconds, command=command)
        return judge.judge(_unpacked(candidate, Path(scratch, "candidate")))


def _packed(path: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(path, path.name)
    return buffer.getvalue()


def _unpacked(content: bytes, directory: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        # Python before 3.10.12 and 3.11.4 has no filter; the archive is of `_packed`.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        archive.extractall(directory)
    (unpacked,) = directory.iterdir()
    return unpacked
