"""The system calls that a sandbox refuses, since neither a mount namespace nor Landlock covers them.

Landlock says nothing of sockets with a path, of modes, owners and times of files, of terminals and key rings, and
bubblewrap leaves some of these open as well. The list becomes a program for seccomp, which the kernel runs at each
system call. The packages that wrap libseccomp for Python are unkept or need its headers where they are installed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence

# Name -> numbers on x86_64 and aarch64; None where the architecture does not have it. Newer calls have one number.
_Numbers = tuple[int | None, int | None]

# Every socket leads out: to sockets with a path, abstract ones, the network, the hypervisor (vsock), and the kernel's
# own services (netlink, packets, cryptography). io_uring would make these calls without seccomp.
_SOCKETS: dict[str, _Numbers] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
# Changes of metadata, which Landlock permits.
_METADATA: dict[str, _Numbers] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
_OTHERS: dict[str, _Numbers] = {
    # Key rings of the user's session, which may hold passwords.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Memory, semaphores and messages that processes share by number or name.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # Memory and open files of other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # Events of other files.
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    # Files by number, whatever their path is.
    "open_by_handle_at": (304, 265),
    # New namespaces, in which a process has more rights, and parts of the kernel that had many faults.
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    # Mounts: root in bubblewrap could make the system's files writable again.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
}
# Calls that change the scheduling of processes -> the arguments, by position, that limit them to the caller.
_OF_PROCESSES: dict[tuple[int, int], dict[int, int]] = {
    (302, 261): {0: 0},  # prlimit64
    (141, 140): {0: 0, 1: 0},  # setpriority, for a process and not for a user
    (251, 30): {0: 1, 1: 0},  # ioprio_set, the same
    (142, 118): {0: 0},  # sched_setparam
    (144, 119): {0: 0},  # sched_setscheduler
    (314, 274): {0: 0},  # sched_setattr
}
_SET_AFFINITY = (203, 122)
_UTIMENSAT, _IOCTL, _CLONE, _CLONE3, _SOCKETPAIR, _FCNTL = (
    (280, 88),
    (16, 29),
    (56, 220),
    (435, 435),
    (53, 199),
    (72, 25),
)

# The allowed controls of open files: questions about terminals (TCGETS, TIOCGPGRP, TIOCGWINSZ), flags of descriptors
# (FIOCLEX, FIONCLEX, FIONBIO), waiting bytes (FIONREAD), and copies (FICLONE). Others change files that may only be
# read: their attributes and version, or a btrfs directory's subvolumes.
_IOCTLS = (0x5401, 0x540F, 0x5413, 0x5450, 0x5451, 0x5421, 0x541B, 0x40049409)
# CUDA's driver has hundreds of controls of its own, so kinds are refused there: those of all file systems (f, v, X), of
# btrfs (0x94), and of terminals (T), which can type a line into them.
_IOCTL_KINDS = tuple(kind << 8 for kind in (*b"fvXT", 0x94))
# Notices of changes of a file (F_NOTIFY), and of attempts to open it (F_SETLEASE).
_FCNTLS = (1026, 1024)
_CLONE_NEWUSER = 0x10000000
_AF_UNIX, _STREAM, _SEQPACKET, _KIND = 1, 1, 5, 0xF

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # the same calls under other numbers
_EACCES, _ENOTTY, _ENOSYS = 13, 25, 38
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_DENY, _PRETEND, _NO_CONTROL, _MISSING = _ERRNO | _EACCES, _ERRNO, _ERRNO | _ENOTTY, _ERRNO | _ENOSYS

# Instructions of the classic Berkeley packet filter, on `struct seccomp_data`.
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

_Instruction = tuple[int, int, int, int]  # code, lines to skip if true and if false, operand


def seccomp_filter(device: str) -> bytes:
    """Return the program that refuses these calls; empty if this architecture is unknown.

    Changes of metadata are answered with success and do nothing: linkers, archivers and `shutil` set the modes and
    times of their own files, and stop at an error. Others are refused as a missing permission.

    Args:
        device: With other than `cpu`, sockets with a path can be made, which CUDA's driver does for itself, but not
            connected.
    """
    architecture = _ARCHITECTURES.get(os.uname().machine)
    if architecture is None:
        return b""
    column = list(_ARCHITECTURES).index(os.uname().machine)
    lines: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _DENY),
    ]
    refused = {**_SOCKETS, **_OTHERS}
    paired = [_SOCKETPAIR[column]]
    if device != "cpu":
        paired.append(refused.pop("socket")[column] or 0)
    for number in _of(refused, column):
        lines += _if_called(number, [(_RETURN, 0, 0, _DENY)])
    for number in _of(_METADATA, column):
        lines += _if_called(number, [(_RETURN, 0, 0, _PRETEND)])
    lines += _if_called(_UTIMENSAT[column], _UNLESS_IT_MAKES_A_FILE)
    for number in paired:
        lines += _if_called(number, _ONLY_CONNECTED)
    lines += _if_called(_IOCTL[column], _controls(device))
    lines += _if_called(_FCNTL[column], _refused_if(1, _EQUAL, _FCNTLS))
    for numbers, own in _OF_PROCESSES.items():
        lines += _if_called(numbers[column], _answered_unless(own, _DENY))
    if device != "cpu":  # OpenMP binds its threads by their numbers, which name processes of the user as well
        lines += _if_called(_SET_AFFINITY[column], _answered_unless({0: 0}, _PRETEND))
    lines += _if_called(_CLONE[column], _refused_if(0, _ANY_BIT, [_CLONE_NEWUSER]))
    # Its flags are in memory, where a filter cannot look: the C library then uses `clone`.
    lines += _if_called(_CLONE3[column], [(_RETURN, 0, 0, _MISSING)])
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _of(calls: dict[str, _Numbers], column: int) -> Iterator[int]:
    return (numbers[column] for numbers in calls.values() if numbers[column] is not None)  # type: ignore[misc]


def _if_called(number: int, lines: Sequence[_Instruction]) -> list[_Instruction]:
    """Return lines that run if the call is this one. The last of them returns."""
    return [(_EQUAL, 0, len(lines), number), *lines]


def _argument(position: int) -> _Instruction:
    return _LOAD, 0, 0, _ARGUMENTS + 8 * position  # its low half, on little-endian machines


def _refused_if(position: int, test: int, operands: Sequence[int]) -> list[_Instruction]:
    """Return lines that refuse a call whose argument passes the test with one of the operands."""
    refusals = [line for operand in operands for line in ((test, 0, 1, operand), (_RETURN, 0, 0, _DENY))]
    return [_argument(position), *refusals, (_RETURN, 0, 0, _ALLOW)]


def _controls(device: str) -> list[_Instruction]:
    """Return lines that answer a control of an open file with "not of this kind" unless it is allowed."""
    allowed = [line for command in _IOCTLS for line in ((_EQUAL, 0, 1, command), (_RETURN, 0, 0, _ALLOW))]
    if device == "cpu":
        return [_argument(1), *allowed, (_RETURN, 0, 0, _NO_CONTROL)]
    kinds = [line for kind in _IOCTL_KINDS for line in ((_EQUAL, 0, 1, kind), (_RETURN, 0, 0, _NO_CONTROL))]
    return [_argument(1), *allowed, (_AND, 0, 0, 0xFF00), *kinds, (_RETURN, 0, 0, _ALLOW)]


def _answered_unless(arguments: dict[int, int], answer: int) -> list[_Instruction]:
    """Return lines that allow a call with these arguments, and answer any other."""
    tests = [
        line
        for position, value in arguments.items()
        for line in (_argument(position), (_EQUAL, 1, 0, value), (_RETURN, 0, 0, answer))
    ]
    return [*tests, (_RETURN, 0, 0, _ALLOW)]


# Python's `touch` makes a file if the time of a path cannot be set to now (a path, and no times).
_UNLESS_IT_MAKES_A_FILE: list[_Instruction] = [
    _argument(1),
    (_EQUAL, 0, 1, 0),
    (_RETURN, 0, 0, _PRETEND),
    _argument(2),
    (_EQUAL, 0, 1, 0),
    (_RETURN, 0, 0, _DENY),
    (_RETURN, 0, 0, _PRETEND),
]

# A socket for datagrams reaches any path also if it is one of a pair.
_ONLY_CONNECTED: list[_Instruction] = [
    _argument(0),
    (_EQUAL, 1, 0, _AF_UNIX),
    (_RETURN, 0, 0, _DENY),
    _argument(1),
    (_AND, 0, 0, _KIND),
    (_EQUAL, 2, 0, _STREAM),
    (_EQUAL, 1, 0, _SEQPACKET),
    (_RETURN, 0, 0, _DENY),
    (_RETURN, 0, 0, _ALLOW),
]
