"""Attacks of confined code on the machine around it: `python inside_attacks.py OUTSIDE`.

OUTSIDE is a JSON object with the targets that `Outside` has created. Prints the names of the successful attacks. It
imports nothing but the standard library, so that it runs as a step, as a package and as a candidate.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import shutil
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
_AT_FDCWD = -100
_TIOCSTI, _FS_IOC_SETFLAGS, _FS_IOC_SETVERSION = 0x5412, 0x40086602, 0x40087602
_CLONE_NEWUSER, _SIGCHLD = 0x10000000, 17
KEY_SPEC_SESSION_KEYRING = -3
_F_OFD_GETLK, _F_OFD_SETLK, _LOCK = 36, 37, "hhqqi0q"


def called(number: int, *arguments: Any) -> int:
    """Make a system call by its number, as code does that a library does not confine; OSError if it is refused."""
    result = LIBC.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def attacks(outside: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return functions that each try one attack, and raise if it fails."""
    file, abstract = outside["file"], "\0" + outside["abstract"]
    ctypes_path = ctypes.c_char_p(os.fsencode(file))

    def socket_of(family: int, kind: int = socket.SOCK_STREAM) -> Callable[[], Any]:
        return lambda: socket.socket(family, kind)

    def connects(address: str) -> Callable[[], Any]:
        return lambda: socket.socket(socket.AF_UNIX).connect(address)

    def from_a_pair(send: bool) -> None:
        ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        if send:
            ours.sendto(b"x", outside["datagrams"])
        else:
            ours.connect(outside["datagrams"])

    def opened(flags: int) -> int:
        return os.open(file, flags)

    def endless(limit: int) -> None:
        if resource.getrlimit(limit)[0] != resource.RLIM_INFINITY:
            raise OSError("there is a limit")

    def lock_of_a_file() -> None:
        fcntl.flock(opened(os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(opened(os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise OSError("both have the lock, so neither has it")

    def lock_for_reading() -> None:
        fcntl.fcntl(opened(os.O_RDONLY), _F_OFD_SETLK, struct.pack(_LOCK, fcntl.F_RDLCK, 0, 0, 0, 0))
        other = fcntl.fcntl(opened(os.O_RDONLY), _F_OFD_GETLK, struct.pack(_LOCK, fcntl.F_WRLCK, 0, 0, 0, 0))
        if struct.unpack(_LOCK, other)[0] == fcntl.F_UNLCK:
            raise OSError("there is no lock")

    def new_user_namespace() -> None:
        child = called(56 if X86 else 220, _CLONE_NEWUSER | _SIGCHLD, 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)

    def shared_memory() -> None:
        LIBC.shmat.restype = ctypes.c_void_p
        if LIBC.shmat(outside["shared-memory"], None, 0) == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "shmat")

    def keyring() -> None:
        key = called(250 if X86 else 219, 10, KEY_SPEC_SESSION_KEYRING, b"user", outside["key"].encode(), 0)
        called(250 if X86 else 219, 11, key, ctypes.create_string_buffer(64), 64)

    def memory_of_another() -> None:
        buffer = ctypes.create_string_buffer(8)
        local = struct.pack("PN", ctypes.addressof(buffer), 8)
        remote = struct.pack("PN", outside["address"], 8)
        called(310 if X86 else 270, outside["process"], local, 1, remote, 1, 0)

    def made_writable() -> None:
        called(442, _AT_FDCWD, os.fsencode(here), 0, struct.pack("QQQQ", 0, 1, 0, 0), 32)  # clear MOUNT_ATTR_RDONLY
        (here / "remounted").write_text("x")

    def capabilities() -> None:
        status = Path("/proc/self/status").read_text()
        if int(status.partition("CapEff:")[2].split()[0], 16) == 0:
            raise OSError("none")

    def asked_about(command: int, argument: int) -> Callable[[], Any]:
        return lambda: fcntl.fcntl(os.open(here if command == fcntl.F_NOTIFY else file, os.O_RDONLY), command, argument)

    def of_another(name: str, value: bytes = b"") -> Callable[[], Any]:
        def touch() -> None:
            with open(f"/proc/{outside['victim']}/{name}", "r+b" if value else "rb", buffering=0) as opened:
                if value:
                    opened.write(value)
                else:
                    opened.read(1)

        return touch

    def own_files() -> None:
        Path("mine").touch()
        Path("mine").touch()
        shutil.copy2("mine", "copied")
        assert Path("copied").read_text() == ""
        Path("copied").write_text("x")

    here = Path(file).parent
    return {
        "path-socket": connects(outside["socket"]),
        "datagram-connect": lambda: from_a_pair(send=False),
        "datagram-send": lambda: from_a_pair(send=True),
        "abstract-socket": connects(abstract),
        "tcp": lambda: socket.create_connection(("127.0.0.1", outside["tcp"]), 2),
        "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", outside["udp"])),
        "vsock": socket_of(40),
        "netlink": socket_of(16, socket.SOCK_RAW),
        "crypto-socket": socket_of(38, socket.SOCK_SEQPACKET),
        "packet-socket": socket_of(17, socket.SOCK_RAW),
        "io-uring": lambda: called(425, 1, ctypes.create_string_buffer(256)),
        "chmod": lambda: os.chmod(file, 0o777),
        "fchmod": lambda: os.fchmod(opened(os.O_RDONLY), 0o777),
        "fchmodat2": lambda: called(452, _AT_FDCWD, ctypes_path, 0o777, 0),
        "chmod-by-proc": lambda: os.chmod(f"/proc/self/fd/{opened(os.O_PATH)}", 0o777),
        "chown": lambda: os.chown(file, 0, 0),
        "utime": lambda: os.utime(file, (1, 1)),
        "utime-now": lambda: os.utime(file),
        "setxattr": lambda: os.setxattr(file, "user.attack", b"x"),
        "chattr": lambda: fcntl.ioctl(opened(os.O_RDONLY), _FS_IOC_SETFLAGS, struct.pack("l", 0x40)),  # nodump
        "file-version": lambda: fcntl.ioctl(opened(os.O_RDONLY), _FS_IOC_SETVERSION, bytes(8)),
        "lock": lock_of_a_file,
        "endless-file": lambda: endless(resource.RLIMIT_FSIZE),
        MEMORY: lambda: endless(resource.RLIMIT_DATA),
        "set-id-file": lambda: os.open("set-id", os.O_CREAT | os.O_WRONLY, 0o4755),
        "set-id-unnamed": lambda: os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o4755),
        "set-id-openat2": lambda: called(437, _AT_FDCWD, b"set-id-2", struct.pack("QQQ", 0o101, 0o4755, 0), 24),
        "set-id-node": lambda: os.mknod("set-id-node", stat.S_IFREG | 0o4755),
        "set-id-directory": lambda: os.mkdir("set-id-directory", 0o2755),
        "read-lock": lock_for_reading,
        "device-mode": lambda: os.chmod("/dev/full", 0o640),
        "kernel-setting": lambda: os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY),
        "kernel-pressure": lambda: os.open("/proc/pressure/cpu", os.O_WRONLY),
        "passwords": lambda: os.open("/etc/shadow", os.O_RDONLY),
        "terminal": lambda: fcntl.ioctl(0, _TIOCSTI, b"x"),
        "keyring": keyring,
        "shared-memory": shared_memory,
        "message-queue": lambda: called(240 if X86 else 180, b"kernel-builder-attack", 0o102, 0o600, None),
        "process-memory": memory_of_another,
        "process-descriptor": lambda: called(438, called(434, outside["process"], 0), 0, 0),
        "signal": lambda: os.kill(outside["process"], 0),
        "environment": lambda: Path(f"/proc/{outside['process']}/environ").read_text(),
        "user-namespace": new_user_namespace,
        "unshare": lambda: called(272 if X86 else 97, _CLONE_NEWUSER),
        "watch": lambda: called(254 if X86 else 27, called(294 if X86 else 26, 0), ctypes_path, 0xFFF),
        "read": lambda: Path(outside["secret"]).read_text(),
        "write": lambda: Path(file).write_text("x"),
        "truncate": lambda: os.truncate(file, 0),
        "open-truncate": lambda: opened(os.O_RDONLY | os.O_TRUNC),
        "rename": lambda: os.rename(file, f"{file}.moved"),
        "remove": lambda: os.remove(file),
        "link": lambda: os.link(file, f"{file}.linked"),
        "directory": (here / "made").mkdir,
        "pipe": lambda: os.mkfifo(here / "pipe"),
        "listen": lambda: socket.socket(socket.AF_UNIX).bind(str(here / "listening")),
        "home": lambda: next(iter(Path(outside["home"]).iterdir())),
        "remount": made_writable,
        "mount-tree": lambda: called(428, _AT_FDCWD, b"/", 1),
        "capabilities": capabilities,
        "device-node": lambda: os.mknod("node", stat.S_IFCHR | 0o600, os.makedev(1, 3)),
        "host-name": lambda: socket.sethostname(socket.gethostname()),
        "controlling-terminal": lambda: os.open("/dev/tty", os.O_RDWR),
        "other-terminal": lambda: os.open(outside["terminal"], os.O_RDWR | os.O_NOCTTY),
        "device": lambda: os.open("/dev/loop-control", os.O_RDWR),
        "limits": lambda: resource.prlimit(outside["victim"], resource.RLIMIT_CORE, (0, 0)),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, outside["victim"], 1),
        "affinity": lambda: os.sched_setaffinity(outside["victim"], {min(os.sched_getaffinity(0))}),
        "scheduler": lambda: os.sched_setscheduler(outside["victim"], os.SCHED_BATCH, os.sched_param(0)),
        "disk-priority": lambda: called(251 if X86 else 30, 1, outside["victim"], 3 << 13),
        "notify": asked_about(fcntl.F_NOTIFY, fcntl.DN_CREATE),
        "lease": asked_about(fcntl.F_SETLEASE, fcntl.F_RDLCK),
        "command-line": of_another("cmdline"),
        "memory-order": of_another("oom_score_adj", b"1000"),
        OWN_FILE: own_files,
    }


# No attack: shows that the program ran in its own directory.
OWN_FILE = "own-file"
# With a GPU, memory has no limit: CUDA's driver maps more than it uses.
MEMORY = "endless-memory"
# Variables of the user that no process inside has.
SECRETS = {"judge-secret", "NVIDIA_API_KEY", "TRITON_SECRET", "NIX_CONFIG"}
# Answered as if they had succeeded, since compilers and archivers set the modes and times of their own files.
METADATA = frozenset(
    {
        *("chmod", "fchmod", "fchmodat2", "chmod-by-proc", "chown", "utime", "utime-now", "setxattr", "device-mode"),
        "affinity",
    }
)


def succeeded(outside: dict[str, Any]) -> Iterator[str]:
    """Try all attacks, and yield the names of those that were not refused."""
    for name, attack in attacks(outside).items():
        with contextlib.suppress(OSError, ValueError):
            attack()
            yield name


if __name__ == "__main__":
    print("\n".join(succeeded(json.loads(sys.argv[1]))))
