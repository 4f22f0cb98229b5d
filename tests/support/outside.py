"""Targets outside of a sandbox: files, sockets, processes and shared memory for `inside_attacks`."""

from __future__ import annotations

import ctypes
import json
import os
import pty
import re
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.support import inside_attacks
from tests.support.inside_attacks import KEY_SPEC_SESSION_KEYRING, LIBC, METADATA, OWN_FILE, X86, called

_IPC_CREAT, _IPC_RMID = 0o1000, 0


def _drop_capabilities() -> None:
    """Become like a process of a user, or of a worker: a confined root may not change one with more capabilities."""
    LIBC.prctl(38, 1, 0, 0, 0)  # no program gets them back
    called(126 if X86 else 91, (0x20080522).to_bytes(8, "little"), bytes(24))


class Outside:
    """Creates the attacks' targets in `directory`, which a sandbox may read; `targets` is their program's argument."""

    def __enter__(self) -> Outside:
        with ExitStack() as opened:
            self.directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="outside-")))
            self.directory.chmod(0o755)
            hidden = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="home-")))
            (hidden / "secret").write_text("secret")
            self._file = self.directory / "file"
            self._file.write_text("the user's")
            self.program = self.directory / "inside_attacks.py"
            self.program.write_text(Path(inside_attacks.__file__).read_text())
            name = secrets.token_hex(8)
            listening = {
                "socket": (socket.SOCK_STREAM, str(self.directory / "socket")),
                "datagrams": (socket.SOCK_DGRAM, str(self.directory / "datagrams")),
                "abstract": (socket.SOCK_STREAM, f"\0{name}"),
            }
            for kind, address in listening.values():
                unix = opened.enter_context(socket.socket(socket.AF_UNIX, kind))
                unix.bind(address)
                if kind == socket.SOCK_STREAM:
                    unix.listen()
            tcp = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            udp = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            udp.bind(("127.0.0.1", 0))
            segment = LIBC.shmget(0, 4096, _IPC_CREAT | 0o600)
            opened.callback(LIBC.shmctl, segment, _IPC_RMID, None)
            opened.callback(Path("/dev/full").chmod, Path("/dev/full").stat().st_mode & 0o777)
            with suppress(OSError):
                called(248 if X86 else 217, b"user", name.encode(), b"secret", 6, KEY_SPEC_SESSION_KEYRING)
            self._victim = opened.enter_context(subprocess.Popen(["sleep", "600"], preexec_fn=_drop_capabilities))  # noqa: PLW1509
            opened.callback(self._victim.kill)
            for descriptor in (terminals := os.openpty()):
                opened.callback(os.close, descriptor)
            self._before = self._state()
            self._memory = ctypes.create_string_buffer(b"secret!!")
            self.targets = {
                "file": str(self._file),
                "socket": listening["socket"][1],
                "datagrams": listening["datagrams"][1],
                "abstract": name,
                "tcp": tcp.getsockname()[1],
                "udp": udp.getsockname()[1],
                "process": os.getpid(),
                "victim": self._victim.pid,
                "terminal": os.ttyname(terminals[1]),
                "address": ctypes.addressof(self._memory),
                "shared-memory": segment,
                "key": name,
                "secret": str(hidden / "secret"),
                "home": str(hidden),
            }
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def reached(self, around: Callable[[Sequence[str]], Sequence[str]]) -> set[str]:
        """Run the attacks on a terminal, in the sandbox that `around` adds to a command; return the successful ones."""
        python = str(Path(sys.executable).resolve())
        command = list(around([python, "-I", "-S", str(self.program), json.dumps(self.targets)]))
        child, terminal = pty.fork()
        if child == 0:
            os._exit(subprocess.call(command))
        output = b""
        with suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as stream:
            while block := stream.read(4096):
                output += block
        os.waitpid(child, 0)
        assert OWN_FILE.encode() in output, output
        return self.real(set(re.findall(r"[a-z0-9-]+\b", output.decode())))

    def real(self, reported: Iterable[str]) -> set[str]:
        """Return the real ones of the reported successes: a metadata call that changes nothing has not succeeded."""
        changed = self._state() != self._before
        return {name for name in reported if name not in METADATA or changed}

    def _state(self) -> tuple[object, ...]:
        try:
            status = self._file.stat()
            attributes = os.listxattr(self._file)
        except OSError:  # removed, or on a file system without attributes
            return ()
        cores = os.sched_getaffinity(self._victim.pid)
        mode = Path("/dev/full").stat().st_mode
        return status.st_mode, status.st_uid, int(status.st_mtime), mode, cores, *attributes
