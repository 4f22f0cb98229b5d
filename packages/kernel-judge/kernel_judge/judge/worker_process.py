"""The judge's side of a worker: starts the process, sends commands, and waits for answers with its own clock."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

import kernel_format
import kernel_judge
import kernel_sandbox
import kernel_tasks
from kernel_builder import api
from kernel_format.files import temporary_directory
from kernel_judge.judge.arena import Arena
from kernel_judge.judge.evaluation import FAILURES, ResultError
from kernel_judge.judge.process_tree import (
    STOPPED,
    descendants,
    disk_bytes,
    map_deleted_files,
    memory_bytes,
    nameless_bytes,
    signal_each,
    suspend_descendants,
    thread_switches,
)
from kernel_sandbox import sandbox
from kernel_sandbox.answers import read_answer
from kernel_sandbox.confine import LARGEST_FILE

_CPU_CLOCK = 2  # CPUCLOCK_SCHED of Linux: the rest of a clock's number is that of a process
_LONGEST_ANSWER, _LONGEST_OUTPUT = 1 << 20, 1500
_SEND_SECONDS, _GUARD_SECONDS = 60, 20
LATE_SECONDS = 0.3  # for a thread that writes a result late, to name the failure
_LATE = "its timed results are written after the worker's answer"
_SAMPLED = 2048  # bytes of the results of a timed command, at random places: 1 ms
# Limits of the processes of one worker: half of the memory, and as much disk as a file of theirs may have.
MOST_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
MOST_PROCESSES = 1000
MOST_DISK = LARGEST_FILE
# A thread that waits for a disk when the others have stopped runs until it handles SIGSTOP.
_MOST_SUSPENDED_SECONDS = 0.5e-3
# glibc returns freed memory to the system when there is much, and getting a page again takes longer than a small kernel
# needs to fill it. Linux often puts two of a worker's threads on one core when they wake up; OpenMP binds each to its
# own. Runs of 337 softmaxes of 48x256 took 5 to 56 ms before, and 4.8 to 5.4 ms with both (4 cores, in a VM).
_STEADY_TIMES = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "OMP_PROC_BIND": "true",
}


class WorkerFailure(ResultError):
    """A worker has failed. `kind` is the name under which the judge rejects the candidate."""


class WorkerProcess(ExitStack):
    """A worker in its sandbox, with a scratch home, the only directory that it may write.

    It may read `readable` beside the system and Python. It shares the arenas `inputs` and `outputs` with this process;
    `arena_bytes` is their size on a GPU.
    """

    def __init__(
        self, kind: str, device: str, *, readable: Sequence[Path] = (), arena_bytes: int = 0, threads: int = 1
    ) -> None:
        super().__init__()
        self._device = device
        self._suspended: dict[int, float] = {}  # processes -> their CPU time
        self._threads: dict[int, tuple[str, int]] = {}  # of suspended processes
        self.suspending = 0.0  # seconds from the answer of the last timed command until all processes were suspended
        # Of the commands that are not answered yet: an answer has that of its command. It starts with one of its own.
        self._tokens: deque[str | None] = deque([None])
        with ExitStack() as opened:
            self.scratch = opened.enter_context(temporary_directory())
            self._free = shutil.disk_usage(self.scratch).free
            self.inputs, self.outputs = (Arena(device, arena_bytes) for _ in range(2))
            opened.callback(self.inputs.close)
            opened.callback(self.outputs.close)
            self._output = opened.enter_context((self.scratch / "output").open("w+b"))
            self._output_start = 0
            self._connection, other = socket.socketpair()
            opened.enter_context(self._connection)
            modules = (api, kernel_format, kernel_sandbox, kernel_judge, kernel_tasks)
            own = [Path(str(module.__file__)).parent.parent for module in modules]
            paths = sandbox.readable([*readable, *own])
            settings = {"sandbox": kind, "scratch": str(self.scratch), "paths": paths, "memory": MOST_MEMORY}
            settings |= {"connection": other.fileno(), "device": device, "threads": threads}
            command = [sys.executable, "-m", "kernel_judge.judge.worker", json.dumps(settings)]
            with other:
                self.process = subprocess.Popen(
                    [*sandbox.prefix(kind, self.scratch, paths, device), *command],
                    cwd=self.scratch,
                    env=self._environment(own),
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    pass_fds=[other.fileno(), *self.inputs.descriptors, *self.outputs.descriptors],
                    start_new_session=True,
                )
            opened.callback(self._kill)
            self.callback(opened.pop_all().close)

    def ready(self, seconds: float) -> None:
        """Wait until the worker has imported Torch, and open the arenas in it."""
        self.wait(seconds)
        self.ask("open", self.inputs.handle, self.outputs.handle, seconds=seconds)

    def start(self, command: str, *arguments: Any) -> None:
        """Send a command without waiting for its answer."""
        message = self._message(command, arguments)
        self._output_start = os.fstat(self._output.fileno()).st_size
        self.go_on()
        self._send(message)

    def wait(self, seconds: float) -> Any:
        """Return the value of the answer to the last command.

        Raises:
            WorkerFailure: If the command failed, or there is no answer in time, or it is none of this protocol.
        """
        try:
            answer = read_answer(self._connection, seconds, _LONGEST_ANSWER, self._check_use)
        except TimeoutError:
            self._kill()
            raise WorkerFailure("timeout", f"it did not finish a call within {seconds:.0f} seconds") from None
        except (EOFError, ConnectionError):
            raise WorkerFailure("died", self._death()) from None
        except ValueError:
            raise WorkerFailure("forged-answer", "it writes into the judge's connection") from None
        known = isinstance(answer, dict) and (answer["failed"] in FAILURES if "failed" in answer else "value" in answer)
        if not known or answer.get("token") != self._tokens.popleft():
            raise WorkerFailure("forged-answer", "it writes into the judge's connection")
        if "failed" in answer:
            words = self._output_since(self._output_start) if answer["failed"] == "raised" else ""
            text = str(answer.get("text", "")) + (f"; it printed: {words}" if words else "")
            raise WorkerFailure(answer["failed"], text)
        return answer["value"]

    def _check_use(self) -> None:
        """Raise if the worker's processes use more than one candidate may, so that others have the rest of the machine.

        The kernel ends them first if memory runs out before, which `confine` asks for.
        """
        processes = {self.process.pid, *descendants(self.process.pid)}
        memory = memory_bytes(processes, MOST_MEMORY) if len(processes) <= MOST_PROCESSES else 0
        arenas = [*self.inputs.descriptors, *self.outputs.descriptors]
        files = disk_bytes(self.scratch) + nameless_bytes(processes, arenas)
        files += self.inputs.excess() + self.outputs.excess()
        lost = self._free - shutil.disk_usage(self.scratch).free
        if lost > MOST_DISK and map_deleted_files(processes):
            files = max(files, lost)
        for name, used, most, unit in (
            ("processes", len(processes), MOST_PROCESSES, 1),
            ("GB of memory", memory, MOST_MEMORY, 1e9),
            ("GB of files", files, MOST_DISK, 1e9),
        ):
            if used > most:
                self._kill()
                words = f"it uses {used / unit:.3g} {name}; at most {most / unit:.3g} are allowed"
                raise WorkerFailure("limit-exceeded", words)

    def _send(self, message: bytes) -> None:
        self._connection.settimeout(_SEND_SECONDS)
        with suppress(OSError):  # it has died, or does not read, which `wait` reports
            self._connection.sendall(message)

    def _message(self, command: str, arguments: Sequence[Any]) -> bytes:
        token = secrets.token_hex(8)
        self._tokens.append(token)
        return pickle.dumps((token, command, arguments))

    def ask(self, command: str, *arguments: Any, seconds: float) -> Any:
        """Send a command and return the value of its answer, as `wait` does."""
        self.start(command, *arguments)
        return self.wait(seconds)

    def timed(self, command: str, *arguments: Any, seconds: float) -> tuple[float, Any]:
        """Return the seconds that a command took by this process's clock, and the value of its answer; then stop.

        Raises:
            WorkerFailure: If the command failed, or if on a CPU a result has changed after the answer.
        """
        message = self._message(command, arguments)
        places = torch.frombuffer(bytearray(os.urandom(8 * _SAMPLED)), dtype=torch.int64) % max(self.outputs.end, 1)
        self._check_suspended()
        started = time.perf_counter()
        self._resume()
        self._send(message)
        value = self.wait(seconds)
        answered = time.perf_counter()
        if self._device == "cpu":
            known = self.outputs.raw(self.outputs.end)[places]
            self.stop()
            if not torch.equal(known, self.outputs.raw(self.outputs.end)[places]):
                raise WorkerFailure("unfinished-work", _LATE)
            self.suspending = time.perf_counter() - answered
        return answered - started, value

    def check_finished(self) -> None:
        """Raise if on a CPU the worker, when it goes on, changes the results of the last timed command."""
        if self._device == "cpu":
            known = self.outputs.raw(self.outputs.end).clone()
            self.go_on()
            time.sleep(LATE_SECONDS)
            if not torch.equal(known, self.outputs.raw(self.outputs.end)):
                raise WorkerFailure("unfinished-work", _LATE)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the processes of a worker that is stopped. Other work does not add to it."""
        return sum(self._suspended.values())

    def stop(self) -> None:
        """Suspend the worker's processes on a CPU until the next command, or `go_on`.

        The guard is not suspended: it ends them when this process is killed.
        """
        if self._device != "cpu" or self._suspended:
            return
        processes = suspend_descendants(self.process.pid, wait=True)
        self._suspended = {process: _cpu_seconds(process) for process in processes}
        self._threads = thread_switches(processes)

    def go_on(self) -> None:
        """Resume the worker.

        Raises:
            WorkerFailure: If its processes have run in the meantime.
        """
        self._check_suspended()
        self._resume()

    def _check_suspended(self) -> None:
        """Raise if suspended processes have run: a timer, or the end of another process, may send them SIGCONT.

        A stopped thread does not leave a core again before something wakes it. One that has then started a process or a
        thread, and stopped, has used hardly any CPU time; one that waited for a disk must use some to stop.
        """
        if not self._suspended:
            return
        now = thread_switches(descendants(self.process.pid))
        woken = [thread for thread, was in self._threads.items() if was[0] == STOPPED and now.get(thread) != was]
        used = sum(max(_cpu_seconds(process) - before, 0.0) for process, before in self._suspended.items())
        if woken or now.keys() - self._threads.keys() or used > _MOST_SUSPENDED_SECONDS:
            self._resume()
            words = f"its processes ran while the judge had suspended them ({used * 1e3:.3g} ms of their CPU time)"
            raise WorkerFailure("ran-while-suspended", f"{words}; start no timer that sends SIGCONT")

    def _resume(self) -> None:
        if self._suspended:
            signal_each(self._suspended, signal.SIGCONT)
            self._suspended = {}

    def _kill(self) -> None:
        end = time.monotonic() + _GUARD_SECONDS
        while self.process.poll() is None and time.monotonic() < end:  # one that is starting has none at first
            signal_each(suspend_descendants(self.process.pid), signal.SIGKILL)  # a guard ends after them
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _death(self) -> str:
        try:
            status = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self._kill()
            return "it closed the judge's connection"
        if status < 0:
            return f"its process was killed by {signal.Signals(-status).name}"
        words = self._output_since(0).splitlines()
        return f"its process ended with status {status}" + (f": {words[-1][:500]}" if words else "")

    def _output_since(self, start: int) -> str:
        """Return the end of the worker's output after an offset, such as the messages of a compiler that it ran."""
        file = self._output.fileno()  # the worker has this file, too, and writes where it last stood
        start = max(start, os.fstat(file).st_size - _LONGEST_OUTPUT)
        return os.pread(file, _LONGEST_OUTPUT, start).decode(errors="replace").strip()

    def _environment(self, packages: Sequence[Path]) -> dict[str, str]:
        scratch = str(self.scratch)
        return {
            **sandbox.environment(self.scratch),
            "TORCH_EXTENSIONS_DIR": f"{scratch}/extensions",
            "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",  # by /proc/cpuinfo; compiling probes takes 10 s
            "TORCH_NO_COMPILER_WRAPPER": "1",  # sccache, which would start a server of its own in each sandbox
            "TRITON_CACHE_DIR": f"{scratch}/triton",
            "PYTHONPATH": os.pathsep.join([*map(str, packages), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "USER": "judge",
            **_STEADY_TIMES,
        }


def _cpu_seconds(process: int) -> float:
    """Return the CPU time of a process in nanoseconds' resolution; that of psutil is 10 ms, half of a timed run."""
    with suppress(OSError):  # it has ended
        return time.clock_gettime(~process << 3 | _CPU_CLOCK)
    return 0.0
