"""Run the judge in a process of its own, one at a time on each device: of this machine, or those of a Ray cluster.

Agents, the log and `best/` of a search stay on this machine. Ray places each judging on a node with a free GPU, or in
a cluster without GPUs spreads them over the nodes. The lock of the device is taken there, too: searches that do not
use Ray respect it.
"""

from __future__ import annotations

import csv
import io
import json
import os
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from kernel_format.cache_directory import default_cache
from kernel_format.errors import ToolchainError
from kernel_format.files import InUse, give_up, locked
from kernel_judge.judge.verdict import EXIT_STATUS, NOT_JUDGED, Verdict
from kernel_judge.search.limited_process import end_guard, guard
from kernel_sandbox.programs import python_module, root_directory, run_program

BUILDER = "kernel-builder"
JUDGE_COMMAND = (BUILDER, "judge")
_OUTPUT_TAIL = 2000  # characters of the judge's output, if it has no verdict
_POLL = 0.05  # seconds between two looks for a free device or the end of the judge
_CONNECT_SECONDS = 10


class Judged(NamedTuple):
    """The answer of the judge. Exactly one of verdict and error is None."""

    verdict: Verdict | None
    error: str | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as the log has it."""
        return {**self._asdict(), "verdict": self.verdict.as_dict() if self.verdict else None}

    @staticmethod
    def from_dict(entry: Mapping[str, Any]) -> Judged:
        """Read the result of `as_dict`."""
        return Judged(**{**entry, "verdict": Verdict.from_dict(entry["verdict"]) if entry["verdict"] else None})


Judge = Callable[[Path], Judged]
"""Returns the verdict on a candidate, or why there is none. Several threads may call it."""


class LocalJudge:
    """Judges on the devices of this machine, with a command like `kernel-builder judge --json`.

    A judge is stopped after `seconds`, which include the build, or as soon as `is_stopping` returns True.
    """

    def __init__(
        self,
        task: Path,
        *,
        seconds: float,
        command: Sequence[str] = JUDGE_COMMAND,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._task, self._seconds, self._is_stopping = task, seconds, is_stopping
        # Of this installation: that of another machine may be elsewhere.
        self._command = [*python_module("kernel_builder"), *command[1:]] if command[0] == BUILDER else command
        self._devices = judging_devices()

    def judge(self, candidate: Path) -> Judged:
        """Return the verdict on a candidate, or why there is none."""
        with free_device(self._devices) as environment:
            started = time.monotonic()
            verdict, error = self._run(candidate, environment)
            return Judged(verdict, error, time.monotonic() - started)

    def _run(self, candidate: Path, environment: Mapping[str, str]) -> tuple[Verdict | None, str | None]:
        command = [*self._command, str(candidate), "--task", str(self._task), "--json"]
        process = subprocess.Popen(
            [*guard(), *command],
            # Agents work meanwhile: threads of Torch that spin for work multiply the time of a busy CPU.
            env={"OMP_WAIT_POLICY": "passive", **os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        end = time.monotonic() + self._seconds
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    printed, errors = (text.decode(errors="replace") for text in process.communicate(timeout=_POLL))
                    break
                if self._is_stopping():
                    return None, "the search was stopped"
                if time.monotonic() > end:
                    took = f"the judge took longer than {self._seconds:.0f} s, with the build"
                    return None, f"{took}; make the candidate smaller"
        finally:
            end_guard(process)
        if process.returncode in EXIT_STATUS.values():
            with suppress(ValueError):
                verdict = Verdict.from_dict(json.loads(printed))
                return (None, f"not judged: {verdict.reason}") if verdict.verdict == NOT_JUDGED else (verdict, None)
        return None, f"there is no verdict (exit status {process.returncode}): {_error(printed, errors)}"


def _error(printed: str, errors: str) -> str:
    """Return the reason of a failure: the message in the judge's JSON, or else the end of its output."""
    with suppress(ValueError, AttributeError):
        failure = json.loads(printed)
        return ". ".join(str(failure[key]) for key in ("message", "hint") if failure.get(key))
    return (errors.strip() or printed.strip())[-_OUTPUT_TAIL:]


def judging_devices() -> dict[str, dict[str, str]]:
    """Return the devices that can judge: name -> the variables that show a process this device alone.

    These are the GPUs that this process may use, by their unique names, or else the CPU.
    """
    listed = ""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        listed = run_program("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader").stdout.decode()
    names = {row[0].strip(): row[1].strip() for row in csv.reader(listed.splitlines()) if len(row) == 2}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = names if visible is None else [word.strip() for word in visible.split(",")]
    wanted = [names.get(word, word) for word in chosen]
    return {name: {"CUDA_VISIBLE_DEVICES": name} for name in wanted if name in names.values()} or {"cpu": {}}


@contextmanager
def free_device(devices: Mapping[str, Mapping[str, str]]) -> Iterator[Mapping[str, str]]:
    """Wait until a device is free, and hold it; yields its variables.

    All searches of a user on a machine that share a cache of the builder respect each other.
    """
    directory = default_cache() / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    # With the name of the host: the cache may be on a network file system.
    locks = {name: directory / f"judge-{socket.gethostname()}-{name}.lock" for name in devices}
    while True:
        for name, path in locks.items():
            with suppress(InUse), locked(path, waiting=give_up):
                yield devices[name]
                return
        time.sleep(_POLL)


@contextmanager
def open_judge(settings: Mapping[str, Any], task: Path, is_stopping: Callable[[], bool]) -> Iterator[Judge]:
    """Yield the judge of a search.

    Args:
        settings: Of `SearchRequest.judge_settings`: "command", "seconds" and "ray".
        is_stopping: Asked often; True stops the judge on this machine.
    """
    command, seconds, address = tuple(settings["command"]), settings["seconds"], settings["ray"]
    if address is None:
        yield LocalJudge(task, seconds=seconds, command=command, is_stopping=is_stopping).judge
        return
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
