"""Limits of time and memory for reading packages and pages of indexes, which may be hostile."""

from __future__ import annotations

import pickle
import resource
import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from kernel_format.errors import CheckError, KernelBuilderError

Result = TypeVar("Result")
_SECONDS = 60  # for a package


def within_limits(
    read: Callable[[], Result], where: str, packages: int = 1, refusal: type[KernelBuilderError] = CheckError
) -> Result:
    """Return the result of `read`, which a child process computes within limits for a number of packages.

    Raises:
        refusal: If it needs more CPU time or memory, or ends the process.
    """
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(read, sender, _SECONDS * packages))
    process.start()
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        error = RuntimeError("ended without an answer")
    process.join()
    if isinstance(error, MemoryError) or process.exitcode in (-signal.SIGKILL, -signal.SIGXCPU):
        raise refusal(
            f"reading it takes more than {_SECONDS * packages} s of CPU time or 4 GB of memory",
            where=where,
            hint="do not use it; ask its publisher for simpler Python files, smaller binaries and shorter lists",
        )
    if process.exitcode:
        ended = f"exit status {process.exitcode}" if process.exitcode > 0 else signal.strsignal(-process.exitcode)
        hint = "run the command again; if the process ends again, do not use it"
        raise refusal(f"the process that reads it ended with {ended}", where=where, hint=hint)
    if error:
        raise error
    return result  # type: ignore[no-any-return]


def _send(read: Callable[[], Result], sender: Connection, seconds: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.alarm(10 * seconds)  # a thread that cannot start, for want of memory, waits without CPU time
    present = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()  # the parent's data
    for limit, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_DATA, present + (4 << 30))):
        _, hard = resource.getrlimit(limit)  # of a caller that is within limits itself, else -1
        resource.setrlimit(limit, (min(most, hard), hard) if hard >= 0 else (most, most))
    try:
        sender.send((read(), None))
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        sender.send((None, error))
