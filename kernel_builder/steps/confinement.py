"""The sandbox of compilers and loaded packages, if the system has one without network."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Literal

from kernel_builder.progress import Progress
from kernel_builder.steps.graph import PlannedVariant
from kernel_builder.toolchain.host_compiler import environment
from kernel_format.errors import ToolchainError
from kernel_format.files import debugging, temporary_directory
from kernel_sandbox import sandbox
from kernel_sandbox.confine import BUBBLEWRAP, LANDLOCK, landlock_version
from kernel_sandbox.programs import find_program

SandboxMode = Literal["auto", "require", "off"]

_COVERS_TRUNCATE = 3
_TRIAL_SECONDS = 60
_SHOWN_BYTES = 4096  # of a log
# Compiles an empty source, and checks that /proc/net/dev lists only loopback, two lines of headings and one more, and
# that a filter of system calls is in force.
_TRIAL = """
echo | "$0" -x c++ -c -o trial.o - || exit 1
lines=0
while read -r _; do lines=$((lines + 1)); done < /proc/self/net/dev
[ $lines -le 3 ] || { echo the network cannot be removed; exit 1; }
while read -r key value; do
    [ "$key" != Seccomp: ] || [ "$value" = 2 ] || { echo system calls cannot be filtered; exit 1; }
done < /proc/self/status
"""
_HINT = (
    "install bubblewrap (Debian, Ubuntu: `apt-get install bubblewrap`; Fedora: `dnf install bubblewrap`), and permit "
    "user namespaces: user.max_user_namespaces above 0, and on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0. "
    "Or build in a container of your own, with `--sandbox off`"
)


@dataclass(frozen=True)
class Confinement:
    """The confinement of a build's processes."""

    kind: str | None = None  # the sandbox: `bubblewrap` or `landlock`; None for no sandbox
    reason: str = "--sandbox off"  # why there is no sandbox; empty if there is one
    tools: tuple[str, ...] = ()  # paths that every process may read

    def around(
        self, command: Sequence[str], scratch: Path, more: Iterable[Path] = (), device: str = "cpu"
    ) -> list[str]:
        """Return a command in the sandbox: it may read its tools and `more`, and write `scratch`, where it starts."""
        if self.kind is None:
            return list(command)
        paths = dict.fromkeys([*self.tools, *(name for path in more for name in (str(path), os.path.realpath(path)))])
        return sandbox.wrapped(command, self.kind, scratch, list(paths), device)


def run(
    command: Sequence[str], scratch: Path, env: Mapping[str, str], seconds: float, output: IO[bytes] | None = None
) -> tuple[str | None, str]:
    """Run a command, which may write without end, and return how it failed, or None, and the end of its log."""
    with TemporaryFile(dir=scratch) as log:
        try:
            status = subprocess.run(
                command,
                cwd=scratch,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output or log,
                stderr=log,
                timeout=seconds,
                check=False,
            ).returncode
            failed = f"ended with status {status}" if status else None
        except subprocess.TimeoutExpired:
            failed = f"did not end within {seconds:.0f} s"
        log.seek(max(0, log.seek(0, os.SEEK_END) - _SHOWN_BYTES))
        return failed, log.read().decode(errors="replace").strip()


def for_steps(mode: SandboxMode, variants: Sequence[PlannedVariant], progress: Progress) -> Confinement:
    """Return the sandbox for a build of these variants; `chosen` describes it."""
    if not variants and mode != "require":
        return Confinement(reason="nothing ran")
    return chosen(mode, next((planned.binary.cxx for planned in variants if planned.binary), None), progress)


def chosen(mode: SandboxMode, compiler: Path | None, progress: Progress | None = None) -> Confinement:
    """Return the first sandbox in which the compiler runs, and without network; warn if there is none."""
    confinement = _first_usable(mode, compiler)
    if confinement.kind is None and mode == "auto" and progress:
        problem = "the sandbox is off" if debugging() else "no sandbox is available"
        progress.say(f"warning: {problem}, so compilers and packages run without one ({confinement.reason})")
    return confinement


def _first_usable(mode: SandboxMode, compiler: Path | None) -> Confinement:
    if mode == "off":
        return Confinement()
    if debugging():
        if mode == "require":
            raise ToolchainError(
                "KERNEL_BUILDER_DEBUG=keep runs nothing in a sandbox",
                where="--sandbox require",
                hint="remove one of the two settings",
            )
        return Confinement(reason="KERNEL_BUILDER_DEBUG=keep")
    strongest = _strongest(compiler, os.environ.get("PATH", ""), os.environ.get("LD_LIBRARY_PATH", ""))
    if strongest.kind is None and mode == "require":
        raise ToolchainError(
            f"this system has no sandbox that can be used: {strongest.reason}", where="--sandbox require", hint=_HINT
        )
    return strongest


@cache
def _strongest(compiler: Path | None, *searched: str) -> Confinement:
    directories = [Path(entry) for path in searched for entry in path.split(os.pathsep) if entry.startswith("/")]
    if compiler:
        directories += [compiler.parent.parent, compiler.resolve().parent.parent]
    tools = tuple(sandbox.readable(directories))
    reasons = []
    for kind in (BUBBLEWRAP, LANDLOCK):
        reason = _missing(kind) or _tried(Confinement(kind, "", tools), compiler)
        if reason is None:
            return Confinement(kind, "", tools)
        reasons.append(f"{kind}: {reason}")
    return Confinement(None, "; ".join(reasons))


def _missing(kind: str) -> str | None:
    if reason := sandbox.missing_filter():
        return reason
    if kind == BUBBLEWRAP:
        return None if find_program("bwrap") else "no program bwrap on PATH"
    version = landlock_version()
    if 0 < version < _COVERS_TRUNCATE:
        return f"its version {version} permits to truncate files; expected version {_COVERS_TRUNCATE} (Linux 6.2)"
    return None if version > 0 else "the kernel does not have it"


def _tried(confinement: Confinement, compiler: Path | None) -> str | None:
    """Return why the compiler, or else a shell, does not run in a sandbox; None if it does."""
    with temporary_directory() as scratch:
        variables = {**environment(), "HOME": str(scratch), "TMPDIR": str(scratch)}
        try:
            trial = confinement.around(["sh", "-c", _TRIAL, str(compiler or "true")], scratch)
            failed, output = run(trial, scratch, variables, _TRIAL_SECONDS)
        except OSError as error:
            return str(error)
    return failed and (output.splitlines() or [failed])[0]
