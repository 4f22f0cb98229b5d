"""A step's directory: `inside`, with the files that it may read, and `run.sh`, which makes its output from them.

Nothing else is inside, so a file that the include scan missed is a compile error instead of a stale object. In a
sandbox, compilers and linkers can write there only; the script takes their output out of it. Commands name files inside
by relative paths.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kernel_builder.backends.host_code import HEADERS_PRINTED
from kernel_builder.steps.confinement import Confinement
from kernel_builder.steps.files_read import ASSEMBLED, HEADERS_READ, places
from kernel_builder.steps.graph import SYSROOT, Binary, CompileStep
from kernel_builder.toolchain.stub_libraries import Sysroot
from kernel_format.files import read_unchanged

# The directory that a compiler can write to.
INSIDE = "inside"
# Lines of `run.sh` before the step's own commands. An output must be a file: a link or a pipe could lead anywhere.
_BEFORE = (
    "#!/bin/sh",
    "set -e",
    'cd "${0%/*}"',
    "exec >> log 2>&1",
    f'take() {{ mv -f "{INSIDE}/$1" "$1" && [ -f "$1" ] && [ ! -L "$1" ]; }}',
)


def stage_compile(step: CompileStep, directory: Path, *, threads: int, confinement: Confinement) -> None:
    """Write the directory of a compile step. The script leaves the object and the lists of files in it."""
    inside = directory / INSIDE
    compiler = step.compiler
    for name, expected in step.files:
        _write(inside, f"src/{name}", read_unchanged(step.project / name, expected))
    for name, text in step.generated.items():
        _write(inside, name, text.encode())
        if text.startswith("#!"):
            (inside / name).chmod(0o755)
    for name in compiler.directories:
        (inside / name).mkdir()
    command = [*with_paths(step.argv, step.roots), "-o", "out.o"]
    shown = shlex.join(command)
    if compiler.threads and threads > 1:
        command.append(compiler.threads.format(threads))
    command += ["-MD", "-MF", HEADERS_READ]
    if compiler.to_assembler:
        # The files of .incbin and .include, which the preprocessor does not see.
        command.append(compiler.to_assembler.format(ASSEMBLED))
    if compiler.environment:
        variables = [f"{name}={value}" for name, value in compiler.environment.items()]
        command = ["env", *with_paths(variables, step.roots), *command]
    readable = [place for root in step.roots.values() for place in places(root)]
    lists = [f'[ ! -e "{INSIDE}/{name}" ] || take {name}' for name in (ASSEMBLED, HEADERS_PRINTED)]
    compile_it = _inside(confinement.around(command, inside, readable))
    _write_script(directory, shown, [compile_it, "take out.o", f"take {HEADERS_READ}", *lists], confinement)


def stage_link(binary: Binary, directory: Path, objects: Sequence[Path], confinement: Confinement) -> None:
    """Write the directory of a link step. The script leaves the binary in it as `out.so`.

    A binary that calls a library of `linked_if_called`, such as the CUDA driver, is linked a second time, with it.
    """
    inside = directory / INSIDE
    for name, text in binary.generated.items():
        _write(inside, name, text.encode())

    def link(libraries: Iterable[str]) -> list[str]:
        return [
            str(binary.cxx),
            *with_paths(binary.argv, binary.roots),
            *map(str, objects),
            "-Wl,--no-as-needed",
            *(f"-l:{name}" for name in libraries),
            *Sysroot(binary.roots[SYSROOT], binary.platform).runtime_arguments,
            "-o",
            "out.so",
        ]

    libraries = binary.libraries
    command = shlex.join(link(libraries))
    for late in binary.linked_if_called:
        libraries = (*libraries, late.library)
        calls = f"nm --dynamic --undefined-only out.so | grep -v '{late.but_not}' | grep -q '{late.symbols}'"
        command += f" && if {calls}; then {shlex.join(link(libraries))}; fi"
    # `nm` reads the output of the linker, in the same sandbox.
    confined = confinement.around(["sh", "-c", command], inside, [*binary.roots.values(), *objects])
    commands = [_inside(confined), "take out.so"]
    _write_script(directory, shlex.join(link(binary.libraries)), commands, confinement)


def with_paths(argv: Sequence[str], roots: Mapping[str, Path]) -> list[str]:
    """Return a command with directories in place of the tokens that stand for them."""
    rendered = list(argv)
    for token, path in roots.items():
        rendered = [part.replace(token, str(path)) for part in rendered]
    return rendered


def _inside(command: Sequence[str]) -> str:
    """Return a shell command that runs in the directory `inside`."""
    return f"( cd {INSIDE} && {shlex.join(command)} )"


def _write(directory: Path, name: str, content: bytes) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (0, 0))  # __TIMESTAMP__ is the time of the file


def _write_script(directory: Path, shown: str, commands: Sequence[str], confinement: Confinement) -> None:
    """Write `run.sh`, which runs the commands one after the other and appends all they print to `log`.

    `command` has the command as a user would run it.
    """
    temporary = directory / INSIDE / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    names = "TMPDIR HOME" if confinement.kind else "TMPDIR"
    variables = [f"export {name}={shlex.quote(str(temporary))}" for name in names.split()]
    _write(directory, "command", os.fsencode(shown))
    _write(directory, "run.sh", os.fsencode("\n".join([*_BEFORE, *variables, *commands, ": > done"]) + "\n"))
