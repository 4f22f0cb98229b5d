"""Limits of time and memory for reading packages, which any user of a Hub may publish."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

from kernel_format.errors import CheckError

Result = TypeVar("Result")
_LIMITS = {resource.RLIMIT_CPU: 20, resource.RLIMIT_DATA: 4 << 30}  # seconds and bytes


def within_limits(read: Callable[[], Result], where: str) -> Result:
    """Return the result of `read`, which a child process computes within limits.

    Raises:
        CheckError: If it needs more CPU time or memory.
    """
    receiver, sender = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=_send, args=(read, sender))
    process.start()
    sender.close()
    with receiver:
        try:
            result, error = receiver.recv()
        except EOFError:  # killed
            result, error = None, MemoryError()
    process.join()
    if isinstance(error, MemoryError):
        raise CheckError(
            f"reading it takes more than {_LIMITS[resource.RLIMIT_CPU]} s of CPU time or 4 GB of memory",
            where=where,
            hint="do not use the package; ask its publisher for simpler Python files and smaller binaries",
        )
    if error:
        raise error
    return result  # type: ignore[no-any-return]


def _send(read: Callable[[], Result], sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for limit, most in _LIMITS.items():
        resource.setrlimit(limit, (most, most))
    try:
        answer = read(), None
    except Exception as error:
        sender.send((None, error))
    else:
        sender.send(answer)
