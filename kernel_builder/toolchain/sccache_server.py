"""Runs the server of sccache, the compiler cache, for the time of a build's steps."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kernel_builder.cache_directory import user_cache
from kernel_format.files import temporary_directory

_SERVER_SECONDS = 10
_LONGEST_PLACE = 60  # of the directory of temporary files: the path of a socket has at most 107 bytes
_PR_SET_PDEATHSIG = 1


@contextmanager
def serving(compiler_cache: Path, cache: Path) -> Iterator[Mapping[str, str]]:
    """Run a server of sccache, which ends with the context, or with this process, and yield how steps reach it.

    The server runs whatever compiler it is told to, outside of every sandbox. So it listens in a directory of this
    user and of this build alone, and runs only while steps do: no package is loaded then. If it does not start, or
    ends, steps run their compilers themselves.

    It leaves the cache's path out of its keys, so that machines whose caches lie elsewhere can share its results. Its
    storage may be remote, and is configured by variables of many names, so it gets the user's; compilers run in the
    environment of each step.
    """
    storage = {"SCCACHE_DIR": str(Path(os.environ.get("SCCACHE_DIR") or user_cache("sccache")).absolute())}
    variables = {**os.environ, **storage, "SCCACHE_BASEDIRS": str(cache)}
    if {"SCCACHE_SERVER_UDS", "SCCACHE_SERVER_PORT"} & os.environ.keys():
        _quietly([str(compiler_cache), "--start-server"], variables)  # the user's own, which others may share
        yield {}
        return
    is_short = len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_PLACE
    with temporary_directory() if is_short else tempfile.TemporaryDirectory(dir="/tmp") as directory:
        address = {"SCCACHE_SERVER_UDS": f"{directory}/socket"}
        libc = ctypes.CDLL(None)
        server = subprocess.Popen(
            [str(compiler_cache)],
            env={**variables, **address, "SCCACHE_START_SERVER": "1", "SCCACHE_NO_DAEMON": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
        )
        try:
            _wait_for(server, Path(address["SCCACHE_SERVER_UDS"]))
            yield {**address, "SCCACHE_IDLE_TIMEOUT": "60"}  # of a server that a client starts where this one has ended
        finally:
            _quietly([str(compiler_cache), "--stop-server"], {**variables, **address})  # it stores what it has first
            with suppress(subprocess.TimeoutExpired):
                server.wait(_SERVER_SECONDS)
            server.kill()
            server.wait()


def _quietly(command: list[str], environment: Mapping[str, str]) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, env=environment)


def _wait_for(server: subprocess.Popen[bytes], address: Path) -> None:
    """Wait until a server listens, or has ended."""
    end = time.monotonic() + _SERVER_SECONDS
    while server.poll() is None and time.monotonic() < end:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(address))
            return
        time.sleep(0.01)
