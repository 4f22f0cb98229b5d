"""Demangle C++ symbols."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kernel_format.files import temporary_directory
from kernel_sandbox import sandbox
from kernel_sandbox.programs import find_program, run_program

_LIMITED = '(ulimit -t 10 && ulimit -v 1000000 && exec "$0") | head -c 32000000'  # s, KB, bytes


def demangle(names: Iterable[str]) -> dict[str, str]:
    """Map each name to its C++ declaration, or to itself if it is not mangled or `c++filt` is missing or fails.

    `c++filt`, a part of binutils, runs in a sandbox if there is one, with limits: a declaration can be exponentially
    longer than its name.
    """
    ordered = list(dict.fromkeys(names))
    program = find_program("c++filt")
    if program is None or not any(name.startswith("_Z") for name in ordered):
        return {name: name for name in ordered}
    with temporary_directory() as scratch:  # names come from binaries that other users publish
        command = sandbox.wrapped(
            ["sh", "-c", _LIMITED, program], sandbox.strongest(), scratch, sandbox.readable([Path(program)]), "cpu"
        )
        done = run_program(*command, stdin="\n".join([*ordered, ""]).encode(), seconds=None)
    *lines, rest = done.stdout.decode("utf-8", "replace").split("\n")
    return dict(zip(ordered, lines if len(lines) == len(ordered) and not rest else ordered, strict=True))
