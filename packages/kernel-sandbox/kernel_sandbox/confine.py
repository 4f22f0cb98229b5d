"""Confines its own process; as a program, it then becomes a command.

    confine.py KIND DEVICE SCRATCH FILTER PATH... -- COMMAND...

FILTER has the programs of `seccomp_filters`, in hexadecimal digits, with a comma between them.

The builder starts it for each step, and the judge's workers import it before Torch: it imports little, to start fast.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import signal
import struct
import sys

BUBBLEWRAP, LANDLOCK, PROCESS = "bubblewrap", "landlock", "process"
INSIDE = "inside"  # a program in bubblewrap, which restricts it further

LARGEST_FILE = 8 << 30
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_CLONE_NEWNS, _MOUNT_FLAGS = 0x00020000, 0b1110  # no setuid files, no devices, no programs

# System calls of Landlock, which have the same numbers on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_CAPSET, _CAPABILITY_VERSION = {"x86_64": 126, "aarch64": 91}, 0x20080522
# Scopes of a ruleset: sockets and signals between its own processes only, since version 6.
_SCOPES_SIGNALS, _ABSTRACT_SOCKETS, _SIGNALS = 6, 1 << 0, 1 << 1

_PROC = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/version", "/proc/filesystems", "/proc/mounts")
_PROC_DIRECTORIES = ("/proc/self", "/proc/sys", "/proc/driver")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def confine(kind: str, scratch: str, paths: list[str], device: str, filtered: list[bytes]) -> None:
    """Confine this process, which must have one thread. Restrictions that the system does not permit are left out.

    Args:
        filtered: The programs of `seccomp_filters`. bubblewrap has been given the first.

    Raises:
        OSError: If the kernel refuses the sandbox `kind`: no program runs with less protection than reported.
    """
    _limit_process(device)
    libc = ctypes.CDLL(None, use_errno=True)
    if kind == BUBBLEWRAP:
        if device != "cpu" and landlock_version() > 0:  # bubblewrap shows all processes then
            _restrict(libc, scratch, paths, device)
        return
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _leave_namespaces(libc, device)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _drop_capabilities(libc)
    if kind == LANDLOCK:
        _restrict(libc, scratch, paths, device)
    if kind == LANDLOCK or has_seccomp():
        chosen = filtered[os.getpid() != 1]  # systems may permit no pid namespace
        instructions = ctypes.create_string_buffer(chosen, len(chosen))
        program = struct.pack("HP", len(chosen) // 8, ctypes.addressof(instructions))
        _checked(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program), "seccomp")


def _limit_process(device: str) -> None:
    """Limit this process and those that it starts, each one's files and memory; without memory, they end first."""
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: LARGEST_FILE}
    if device == "cpu":  # CUDA's driver maps more than it uses
        limits[resource.RLIMIT_DATA] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, value in limits.items():
        try:
            hard = resource.getrlimit(limit)[1]
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)  # root could raise a lower limit
            resource.setrlimit(limit, (most, most))
        except (ValueError, OSError):
            pass
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Give up the capabilities of root beside its own files: devices, the clock, the host's name, mounts.

    After PR_SET_NO_NEW_PRIVS no program gets it back.
    """
    number = _CAPSET.get(os.uname().machine)
    if number is not None:
        _checked(libc.syscall(number, struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)), "capset")


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
    in it end. It ends with this one. With a mount namespace, /proc shows the pid namespace.
    """
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | flags) != 0:
        return
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError:
            pass
    if flags & _CLONE_NEWPID:
        closes_with_parent, parents = os.pipe()
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            ended = os.waitstatus_to_exitcode(status)
            os._exit(ended if ended >= 0 else 128 - ended)  # as shells and bubblewrap do
        os.close(parents)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if select.select([closes_with_parent], [], [], 0)[0]:
            os._exit(128 + signal.SIGKILL)  # the parent ended before PR_SET_PDEATHSIG was in force
        os.close(closes_with_parent)
    if flags & _CLONE_NEWNS:  # bubblewrap looks for its child's number in this namespace, and fails without one
        libc.mount(b"proc", b"/proc", b"proc", _MOUNT_FLAGS, None)


def landlock_version() -> int:
    """Return the version of Landlock that the kernel has; 0 or less for none."""
    return int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, 0, 1))


def has_seccomp() -> bool:
    """Return whether the kernel runs filters of system calls."""
    # It looks for the filter, at no address, only if it supports filters.
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None) != 0 and ctypes.get_errno() == errno.EFAULT


def _restrict(libc: ctypes.CDLL, scratch: str, paths: list[str], device: str) -> None:
    """Permit reading `paths` and writing `scratch`, and nothing else; no TCP, no signals to other processes."""
    version = landlock_version()
    everything = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    scoped = _ABSTRACT_SOCKETS | _SIGNALS if version >= _SCOPES_SIGNALS else 0
    attributes = struct.pack("QQQ", everything, 3 if version >= 4 else 0, scoped)
    size = 24 if version >= _SCOPES_SIGNALS else 16 if version >= 4 else 8
    written = [scratch, *_DEVICES]
    if device != "cpu":
        # CUDA names its threads in /proc/self, and does not start where it may not.
        written += ["/proc/self", *gpu_devices()]
    rules = [(path, _READ & everything) for path in (*paths, *_PROC, *_PROC_DIRECTORIES)]
    _enforce(libc, attributes[:size], rules + [(path, everything) for path in written])


def gpu_devices() -> list[str]:
    """Return the paths in /dev that CUDA's driver uses."""
    return ["/dev/shm", *(f"/dev/{name}" for name in sorted(os.listdir("/dev")) if name.startswith("nvidia"))]


def keep_signals_inside() -> None:
    """Let this process and those that it will start signal each other only, if the kernel can see to that."""
    if landlock_version() >= _SCOPES_SIGNALS:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _enforce(libc, struct.pack("QQQ", 0, 0, _SIGNALS), [])


def _enforce(libc: ctypes.CDLL, attributes: bytes, rules: list[tuple[str, int]]) -> None:
    """Restrict this process to a ruleset. Its rules are paths, which need not exist, and rights."""
    ruleset = _checked(libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    for path, rights in rules:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & _OF_FILES, descriptor)
        _checked(libc.syscall(_ADD_RULE, ruleset, 1, rule, 0))
        os.close(descriptor)
    _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _checked(result: int, of: str = "Landlock") -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{of}: {os.strerror(ctypes.get_errno())}")
    return result


def main() -> None:
    """Confine this process, and become the command."""
    kind, device, scratch, programs, *words = sys.argv[1:]
    filtered = [bytes.fromhex(program) for program in programs.split(",")]
    end = words.index("--")
    paths, command = words[:end], words[end + 1 :]
    if kind == BUBBLEWRAP:  # which confines its command itself
        _limit_process(device)
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if device == "cpu":
            _enter_namespaces(libc, _CLONE_NEWPID | _CLONE_NEWNS)
        else:  # processes of other namespaces have numbers here
            keep_signals_inside()
        file = os.memfd_create("filter", 0)  # open in the command
        os.pwrite(file, filtered[0], 0)
        command[1:1] = ["--seccomp", str(file)]
    else:
        confine(BUBBLEWRAP if kind == INSIDE else kind, scratch, paths, device, filtered)
    try:
        os.setsid()  # leave the user's terminal, where it could read the user's input
    except PermissionError:  # a session of its own already, or without namespaces
        pass
    os.chdir(scratch)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
