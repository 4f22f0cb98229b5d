"""Confines a process: bubblewrap where it is installed and may be used, else Landlock, else what any process can do.

Each of them takes away the network where the system permits it, the sight of other processes' memory, and writing
outside a scratch directory. The judge's workers import this module before Torch. As a program (`python sandbox.py
SETTINGS COMMAND...`), it confines its own process and becomes the command.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

BUBBLEWRAP, LANDLOCK, PROCESS = "bubblewrap", "landlock", "process"

_LARGEST_FILE = 8 << 30
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000

# System calls of Landlock, which have the same numbers on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/sys", "/nix/store")
_PROC = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/version", "/proc/filesystems", "/proc/mounts")
_PROC_DIRECTORIES = ("/proc/self", "/proc/sys", "/proc/driver")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")


# Variables that programs need. Others may hold secrets.
_KEPT = {"PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CC", "CXX"}
# Without these a compiler that is not installed in the system's directories does not find its parts.
_KEPT |= {"CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"}
_KEPT_PREFIXES = ("OMP_", "KMP_", "MKL_", "NVIDIA_", "TORCH_CUDA_ARCH", "TRITON_", "NIX_")


def readable(more: Iterable[Path]) -> list[str]:
    """Return the paths that a process may read: the system, Python with what it imports, and `more`.

    The user's home, and what contains it, are not among them, though programs are started there.
    """
    home = Path(os.path.realpath(os.path.expanduser("~")))  # noqa: PTH111  # `Path.home` needs a passwd entry
    found = [sys.prefix, sys.base_prefix, *(path for path in sys.path if path)]
    found += [os.environ.get("CUDA_HOME", "/usr/local/cuda"), *map(str, more)]
    found = [path for path in found if not home.is_relative_to(os.path.realpath(path))]
    both = [path for one in (*_SYSTEM, *found) for path in (one, os.path.realpath(one))]
    return list(dict.fromkeys(path for path in both if Path(path).exists()))


def environment(scratch: Path) -> dict[str, str]:
    """Return this process's environment without what could hold a secret; its home is the scratch directory."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    own = {"HOME": str(scratch), "TMPDIR": str(scratch), "XDG_CACHE_HOME": f"{scratch}/.cache", "HF_HUB_OFFLINE": "1"}
    return {**kept, **own}


def wrapped(command: Sequence[str], kind: str, scratch: Path, paths: Sequence[str], device: str) -> list[str]:
    """Return a command that runs in a sandbox: it may read `paths`, and write `scratch`, where it starts."""
    if kind == BUBBLEWRAP:
        words = prefix(kind, scratch, paths, device)
        if device != "cpu":
            return [*words, *command]
        # With a first process of bubblewrap's own, bubblewrap would end before all of the others have.
        return [*words, "--as-pid-1", "sh", "-c", '"$@"; exit $?', "sh", *command]
    return [*_program(kind, scratch, paths, device), *command]


def _program(kind: str, scratch: Path, paths: Sequence[str], device: str) -> list[str]:
    """Return the words of this module as a program, before the command that it becomes."""
    settings = json.dumps([kind, str(scratch), [] if kind == BUBBLEWRAP else list(paths), device])
    return [sys.executable, "-I", "-S", __file__, settings]


@functools.cache
def strongest() -> str:
    """Return the name of the strongest sandbox that this system permits."""
    if program := shutil.which("bwrap"):
        trial = [program, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "true"]
        with suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run(trial, capture_output=True, check=False, timeout=10).returncode == 0:
                return BUBBLEWRAP
    return LANDLOCK if landlock_version() > 0 else PROCESS


def prefix(kind: str, scratch: Path, paths: Sequence[str], device: str) -> list[str]:
    """Return the words before a worker's command: those of bubblewrap, or none."""
    if kind != BUBBLEWRAP:
        return []
    words = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--unshare-user", "--unshare-net", "--unshare-uts"]
    if device == "cpu":
        # If bubblewrap is killed while it starts, its child may sleep for ever (github.com/containers/bubblewrap/
        # issues/633). In a pid namespace whose first process is bubblewrap, the child ends with it.
        words = [*_program(kind, scratch, paths, device), *words]
        words += ["--unshare-pid", "--unshare-ipc", "--dev", "/dev", "--proc", "/proc"]
    else:  # handles of GPU memory work between processes of one pid namespace only
        words += ["--dev-bind", "/dev", "/dev", "--proc", "/proc"]
    for path in _outermost(paths):
        link = Path(path).is_symlink()
        words += ["--symlink", str(Path(path).readlink()), path] if link else ["--ro-bind", path, path]
    # What remains is the root, a file system in memory.
    return [*words, "--bind", str(scratch), str(scratch), "--remount-ro", "/", "--chdir", str(scratch)]


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths that are not inside another one."""
    found: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(Path(path).is_relative_to(one) for one in found if not Path(one).is_symlink()):
            found.append(path)
    return found


def confine(kind: str, scratch: Path, paths: Sequence[str], device: str) -> None:
    """Confine this process, which must have one thread. What the system does not permit is left out."""
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, _LARGEST_FILE)):
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))
    if kind == BUBBLEWRAP:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _leave_namespaces(libc, device)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if kind == LANDLOCK:
        _restrict(libc, scratch, paths, device)


def _leave_namespaces(libc: ctypes.CDLL, device: str) -> None:
    """Enter a user namespace, where root has no rights over the judge, and a network namespace without interfaces.

    On the CPU the worker is the first process of a pid namespace as well, so that its helpers end with it.
    """
    if device == "cpu":
        _enter_namespaces(libc, _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWIPC)
    elif libc.unshare(_CLONE_NEWNET) != 0:  # the driver shares memory between processes of one user and pid namespace
        _enter_namespaces(libc, _CLONE_NEWNET)


def _enter_namespaces(libc: ctypes.CDLL, flags: int) -> None:
    """Enter a user namespace and those of `flags`, if the system permits it.

    With a pid namespace this process waits, and a child goes on: the namespace's first process, with which all others
    in it end. It ends with this one.
    """
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | flags) != 0:
        return
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with suppress(OSError):
            Path("/proc/self", name).write_text(text)
    if flags & _CLONE_NEWPID:
        closes_with_parent, parents = os.pipe()
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            ended = os.waitstatus_to_exitcode(status)
            os._exit(ended if ended >= 0 else 128 - ended)  # as shells and bubblewrap do
        os.close(parents)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if select.select([closes_with_parent], [], [], 0)[0]:
            os._exit(128 + signal.SIGKILL)  # the parent ended before the kernel knew what to do then
        os.close(closes_with_parent)


def landlock_version() -> int:
    """Return the version of Landlock that the kernel has; 0 or less for none."""
    return int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, 0, 1))


def _restrict(libc: ctypes.CDLL, scratch: Path, paths: Sequence[str], device: str) -> None:
    """Permit reading `paths` and writing `scratch`, and nothing else; no TCP, no signals to other processes.

    Raises:
        OSError: If the kernel refuses, so that no candidate runs with less than the verdict says.
    """
    version = landlock_version()
    everything = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("QQQ", everything, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _checked(libc.syscall(_CREATE_RULESET, attributes, size, 0))
    written = [str(scratch), *_DEVICES]
    if device != "cpu":
        # CUDA names its threads in /proc/self, and does not start where it may not.
        written += ["/proc/self", "/dev/shm", *map(str, Path("/dev").glob("nvidia*"))]
    rules = [(path, _READ) for path in (*paths, *_PROC, *_PROC_DIRECTORIES)] + [(path, everything) for path in written]
    for path, rights in rules:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        permitted = rights & everything if Path(path).is_dir() else rights & everything & _OF_FILES
        rule = struct.pack("=Qi", permitted, descriptor)
        _checked(libc.syscall(_ADD_RULE, ruleset, 1, rule, 0))
        os.close(descriptor)
    _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result


def main() -> None:
    """Confine this process, and become the command."""
    kind, scratch, paths, device = json.loads(sys.argv[1])
    if kind == BUBBLEWRAP:  # which confines its command itself
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _enter_namespaces(libc, _CLONE_NEWPID)
    else:
        confine(kind, Path(scratch), paths, device)
    os.chdir(scratch)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
