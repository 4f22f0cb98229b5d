"""The system calls that a sandbox refuses, since neither a mount namespace nor Landlock covers them.

Landlock says nothing of sockets with a path, of modes, owners and times of files, of terminals and key rings, and
bubblewrap leaves some of these open as well. The list becomes a program for seccomp, which the kernel runs at each
system call; `system_calls.json` has the numbers. The packages that wrap libseccomp for Python are unkept or need its
headers where they are installed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# The numbers of the calls on x86_64 and aarch64, null where the architecture does not have a call.
_TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())

# The allowed controls of open files: questions about terminals (TCGETS, TIOCGPGRP, TIOCGWINSZ), flags of descriptors
# (FIOCLEX, FIONCLEX, FIONBIO), waiting bytes (FIONREAD), and copies (FICLONE). Others change files that may only be
# read: their attributes and version, or a btrfs directory's subvolumes.
_IOCTLS = (0x5401, 0x540F, 0x5413, 0x5450, 0x5451, 0x5421, 0x541B, 0x40049409)
# CUDA's driver has hundreds of controls of its own, so kinds are refused there: those of all file systems (f, v, X), of
# btrfs (0x94), and of terminals (T), which can type a line into them.
_IOCTL_KINDS = tuple(kind << 8 for kind in (*b"fvXT", 0x94))
_CLONE_FILES, _CLONE_THREAD, _CLONE_NEWUSER = 0x400, 0x10000, 0x10000000
_AF_UNIX, _STREAM, _SEQPACKET, _KIND = 1, 1, 5, 0xF
_O_CREAT, _O_TMPFILE, _SET_ID = 0o100, 0o20000000, 0o6000

# Their order is that of the numbers in the table.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # the same calls under other numbers
_EACCES, _ENOTTY, _ENOSYS = 13, 25, 38
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_DENY, _PRETEND, _NO_CONTROL, _MISSING = _ERRNO | _EACCES, _ERRNO, _ERRNO | _ENOTTY, _ERRNO | _ENOSYS
# Notices of changes of a file (F_NOTIFY), and of attempts to open it (F_SETLEASE). Locks (F_SETLK, F_SETLKW, and of an
# open file): those of reading need no right to write, and stop programs that write.
_FCNTLS = {1026: _DENY, 1024: _DENY, 6: _PRETEND, 7: _PRETEND, 37: _PRETEND, 38: _PRETEND}

# Instructions of the classic Berkeley packet filter, on `struct seccomp_data`.
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

_Instruction = tuple[int, int, int, int]  # code, lines to skip if true and if false, operand


def seccomp_filters(device: str) -> list[bytes]:
    """Return the programs of `seccomp_filter` for a process in a pid namespace of its own, and without one."""
    return [seccomp_filter(device, shares_numbers=shares) for shares in (device != "cpu", True)]


def seccomp_filter(device: str, *, shares_numbers: bool = False) -> bytes:
    """Return the program that refuses these calls; empty if this architecture is unknown.

    Changes of metadata and locks are answered with success and do nothing: linkers, archivers and `shutil` set the
    modes and times of their own files, and stop at an error. Others are refused as a missing permission.

    Args:
        device: With other than `cpu`, sockets with a path can be made, which CUDA's driver does for itself, but not
            connected.
        shares_numbers: Whether numbers of processes outside are valid inside.
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
    own = {call: numbers[column] for call, numbers in _TABLE["with rules of their own"].items()}
    paired = [own["socketpair"]]
    refused = [*_numbers("refused", column), *(_numbers("refused on a CPU", column) if device == "cpu" else ())]
    for call, number in refused:
        if device != "cpu" and call == "socket":
            paired.append(number)
        else:
            lines += _if_called(number, [(_RETURN, 0, 0, _DENY)])
    for _, number in _numbers("pretended", column):
        lines += _if_called(number, [(_RETURN, 0, 0, _PRETEND)])
    lines += _if_called(own["utimensat"], _UNLESS_IT_MAKES_A_FILE)
    for number in paired:
        lines += _if_called(number, _ONLY_CONNECTED)
    lines += _if_called(own["ioctl"], _controls(device))
    lines += _if_called(own["fcntl"], _answered_if(1, _FCNTLS))
    for call in _TABLE["limited to the caller"]:
        lines += _if_called(call["numbers"][column], _answered_unless(call["arguments"], _DENY))
    if shares_numbers:  # OpenMP binds its threads by their numbers, which name processes of the user as well
        lines += _if_called(own["sched_setaffinity"], _answered_unless([(0, 0)], _PRETEND))
    for call in _TABLE["without the bits of setuid and setgid"]:
        if (number := call["numbers"][column]) is not None:
            lines += _if_called(number, _without_set_id(call["mode"], call.get("flags")))
    lines += _if_called(own["clone"], _ONE_TABLE_OF_FILES)
    # Their flags are in memory, where a filter cannot look: the C library then uses `clone` and `openat`.
    for call in ("clone3", "openat2"):
        lines += _if_called(own[call], [(_RETURN, 0, 0, _MISSING)])
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _numbers(group: str, column: int) -> Iterator[tuple[str, int]]:
    calls = (call for entry in _TABLE[group] for call in entry["calls"].items())
    return ((name, numbers[column]) for name, numbers in calls if numbers[column] is not None)


def _if_called(number: int, lines: Sequence[_Instruction]) -> list[_Instruction]:
    """Return lines that run if the call is this one. The last of them returns."""
    return [(_EQUAL, 0, len(lines), number), *lines]


def _argument(position: int) -> _Instruction:
    return _LOAD, 0, 0, _ARGUMENTS + 8 * position  # its low half, on little-endian machines


def _answered_if(position: int, answers: Mapping[int, int], other: int = _ALLOW) -> list[_Instruction]:
    """Return lines that answer a call whose argument equals an operand, and at their end any other."""
    lines = [line for operand, answer in answers.items() for line in ((_EQUAL, 0, 1, operand), (_RETURN, 0, 0, answer))]
    return [_argument(position), *lines, (_RETURN, 0, 0, other)]


def _controls(device: str) -> list[_Instruction]:
    """Return lines that answer a control of an open file with "not of this kind" unless it is allowed."""
    allowed = _answered_if(1, dict.fromkeys(_IOCTLS, _ALLOW), _NO_CONTROL)
    if device == "cpu":
        return allowed
    return [*allowed[:-1], (_AND, 0, 0, 0xFF00), *_answered_if(1, dict.fromkeys(_IOCTL_KINDS, _NO_CONTROL))[1:]]


def _answered_unless(arguments: Iterable[Sequence[int]], answer: int) -> list[_Instruction]:
    """Return lines that allow a call with these arguments (position, value), and answer any other."""
    tests = [
        line
        for position, value in arguments
        for line in (_argument(position), (_EQUAL, 1, 0, value), (_RETURN, 0, 0, answer))
    ]
    return [*tests, (_RETURN, 0, 0, _ALLOW)]


def _without_set_id(mode: int, flags: int | None) -> list[_Instruction]:
    """Return lines that refuse to create a file with the rights of its owner. Without O_CREAT, the mode is any number.

    Args:
        mode: The position of the mode among the arguments.
        flags: The position of the flags of `open`; None for a call that always creates a file.
    """
    lines = [_argument(mode), (_ANY_BIT, 0, 1, _SET_ID), (_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)]
    return lines if flags is None else [_argument(flags), (_ANY_BIT, 0, 3, _O_CREAT | _O_TMPFILE), *lines]


# Python's `touch` makes a file if the time of a path cannot be set to now (a path, and no times).
_UNLESS_IT_MAKES_A_FILE = [*_answered_if(1, {0: _PRETEND})[:-1], *_answered_if(2, {0: _DENY}, _PRETEND)]

# A thread with a table of files of its own could keep files open that /proc does not list for its process.
_ONE_TABLE_OF_FILES: list[_Instruction] = [
    _argument(0),
    (_ANY_BIT, 2, 0, _CLONE_NEWUSER),
    (_ANY_BIT, 0, 2, _CLONE_THREAD),
    (_ANY_BIT, 1, 0, _CLONE_FILES),
    (_RETURN, 0, 0, _DENY),
    (_RETURN, 0, 0, _ALLOW),
]

# A socket for datagrams reaches any path also if it is one of a pair.
_ONLY_CONNECTED: list[_Instruction] = [
    *_answered_unless([(0, _AF_UNIX)], _DENY)[:-1],
    _argument(1),
    (_AND, 0, 0, _KIND),
    *_answered_if(1, {_STREAM: _ALLOW, _SEQPACKET: _ALLOW}, _DENY)[1:],
]
