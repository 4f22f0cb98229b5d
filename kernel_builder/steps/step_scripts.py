"""A step's directory: `inside`, with the files that it may read, and `run.sh`, which makes its output from them.

Nothing else is inside, so a file that the include scan missed is a compile error instead of a stale object. In a
sandbox, compilers and linkers can write there only. The script and the files that it trusts are beside it.
Commands name files in it by relative paths.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from kernel_builder.steps import files_read
from kernel_builder.steps.cache import digest_path, object_path
from kernel_builder.steps.confinement import Confinement
from kernel_builder.steps.files_read import ASSEMBLED, HEADERS_READ, INSIDE, READABLE
from kernel_builder.steps.graph import SYSROOT, Binary, CompileStep
from kernel_builder.toolchain.own_headers import escaped
from kernel_builder.toolchain.sysroot import Sysroot
from kernel_format.files import read_unchanged

# Lines of `run.sh` before the step's own commands.
_BEFORE = (
    "#!/bin/sh",
    "set -e",
    'cd "${0%/*}"',
    "exec >> log 2>&1",
)
_COMMAND = "command"

_UNCONFINED = Confinement()


def stage_compile(
    step: CompileStep,
    directory: Path,
    output: Path,
    *,
    threads: int = 1,
    confinement: Confinement = _UNCONFINED,
) -> None:
    """Write the directory of a compile step."""
    inside = directory / INSIDE
    for name, expected in step.files:
        _write(inside, f"src/{name}", read_unchanged(step.project / name, expected))
    for name, text in step.generated.items():
        _write(inside, name, text.encode())
        if text.startswith("#!"):
            (inside / name).chmod(0o755)
    command = with_paths(step.argv, step.roots)
    compiler = step.compiler
    for name in compiler.directories:
        (inside / name).mkdir()
    if compiler.threads and threads > 1:
        command.append(compiler.threads.format(threads))
    command += ["-o", "out.o"]
    _write(directory, _COMMAND, os.fsencode(shlex.join(command)))
    _write(directory, READABLE, "\n".join(_readable(step, directory)).encode(errors="surrogateescape"))
    command += ["-MD", "-MF", HEADERS_READ]
    if compiler.to_assembler:
        # The files of .incbin and .include, which the preprocessor does not see.
        command.append(compiler.to_assembler.format(ASSEMBLED))
    if compiler.environment:
        variables = [f"{name}={value}" for name, value in compiler.environment.items()]
        command = ["env", *with_paths(variables, step.roots), *command]
    readable = [place for root in step.roots.values() for place in _places(root)]
    compile_it = _inside(shlex.join(confinement.around(command, inside, readable)))
    output.parent.mkdir(parents=True, exist_ok=True)
    store = [sys.executable, "-I", "-S", files_read.__file__, str(output), str(digest_path(output))]
    _write_script(directory, [compile_it, shlex.join(store)], confinement)


@lru_cache(maxsize=64)
def _places(root: Path) -> frozenset[Path]:
    """Return the real directories of a tree's files, by which g++ names headers: a toolkit may consist of links."""
    places = {root, root.resolve()}
    for directory in (root, root / "include"):
        for entry in os.scandir(directory) if directory.is_dir() else ():
            if entry.is_symlink():
                real = Path(entry.path).resolve()
                places.add(real if real.is_dir() else real.parent)
    return frozenset(places)


def _readable(step: CompileStep, directory: Path) -> list[str]:
    """Return expressions for the paths of all files that a compiler may read in a step."""
    roots = {str(place) for root in step.roots.values() for place in _places(root)}
    return [
        r"\./(src|builder)/.*",
        *(f"{escaped(root)}/.*" for root in sorted(roots)),
        *step.headers,
        # The assembler's input, and the names in it of the files that it was generated from.
        rf"{escaped(str(directory / INSIDE / 'tmp'))}/(cc\w+|[^/]+-[0-9a-f]+)\.s",
        r"\./[^/]+\.(c|cc|cpp|cu|cxx|ii)",
        rf"\./[^/]+{escaped(Path(step.source).suffix)}",
    ]


def _inside(command: str) -> str:
    """Return a shell command that runs in the directory `inside`."""
    return f"( cd {INSIDE} && {command} )"


def linked(directory: Path) -> Path:
    """Return the binary of a link step."""
    return directory / "out.so"


def stage_link(binary: Binary, directory: Path, cache: Path, confinement: Confinement = _UNCONFINED) -> None:
    """Write the directory of a link step. The script leaves the binary at `linked`, for a check of its symbols.

    A binary that calls a library of `linked_if_called`, such as the CUDA driver, is linked a second time, with it.
    """
    inside = directory / INSIDE
    for name, text in binary.generated.items():
        _write(inside, name, text.encode())
    objects = [object_path(cache, step) for step in binary.objects]

    def link(libraries: Sequence[str]) -> str:
        command = _link(binary, cache, libraries)
        confined = confinement.around(command, inside, [*binary.roots.values(), *objects])
        # The output must be a file: a link or a pipe could lead anywhere.
        taken = f"mv -f {INSIDE}/out.so out.so && [ -f out.so ] && [ ! -L out.so ] || exit 1"
        return f"{_inside(shlex.join(confined))} && {taken}"

    commands = [link(binary.libraries)]
    libraries = binary.libraries
    for late in binary.linked_if_called:
        libraries = (*libraries, late.library)
        calls = f"nm --dynamic --undefined-only out.so | grep -v '{late.but_not}' | grep -q '{late.symbols}'"
        commands.append(f"! {{ {calls}; }} || {{ {link(libraries)}; }}")
    _write(directory, _COMMAND, os.fsencode(shlex.join(_link(binary, cache, binary.libraries))))
    _write_script(directory, commands, confinement)


def _link(binary: Binary, cache: Path, libraries: Sequence[str]) -> list[str]:
    return [
        str(binary.cxx),
        *with_paths(binary.argv, binary.roots),
        *(str(object_path(cache, step)) for step in binary.objects),
        "-Wl,--no-as-needed",
        *(f"-l:{name}" for name in libraries),
        *Sysroot(binary.roots[SYSROOT], binary.platform).runtime_arguments,
        "-o",
        "out.so",
    ]


def command_of(directory: Path) -> str:
    """Return the command of a step as a user would run it."""
    return os.fsdecode((directory / _COMMAND).read_bytes())


def with_paths(argv: Sequence[str], roots: Mapping[str, Path]) -> list[str]:
    """Return a command with directories in place of the tokens that stand for them."""
    rendered = list(argv)
    for token, path in roots.items():
        rendered = [part.replace(token, str(path)) for part in rendered]
    return rendered


def _write(directory: Path, name: str, content: bytes) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (0, 0))  # __TIMESTAMP__ is the time of the file


def _write_script(directory: Path, commands: Sequence[str], confinement: Confinement) -> None:
    """Write `run.sh`, which runs the commands one after the other and appends all they print to `log`."""
    temporary = directory / INSIDE / "tmp"
    temporary.mkdir(exist_ok=True)
    names = "TMPDIR HOME" if confinement.kind else "TMPDIR"
    variables = [f"export {name}={shlex.quote(str(temporary))}" for name in names.split()]
    lines = [*_BEFORE, *variables, *commands, ": > done"]
    _write(directory, "run.sh", os.fsencode("\n".join(lines) + "\n"))
