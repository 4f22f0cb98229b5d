"""Runs a `setup.py` in a sandbox as on several machines, and returns the extensions that it declares on each.

`recorder.py` is the program in the sandbox. It runs a copy of the script, which may write files beside itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from kernel_builder import toml_file
from kernel_builder.config.project_files import work_tree
from kernel_builder.steps import confinement
from kernel_builder.steps.confinement import SandboxMode
from kernel_format.errors import ConfigError
from kernel_format.files import temporary_directory
from kernel_sandbox.answers import has_form

_RECORDER = Path(__file__).with_name("recorder.py")
_SECONDS = 120
_LARGEST_RECORD = 4 << 20
_ARGUMENTS = ("name", "sources", "include_dirs", "define_macros", "undef_macros", "extra_compile_args")
# The form of a record, which the script could change.
_RECORD = {
    "error": (str, type(None)),
    "settings": dict,
    "architectures": str,
    "extensions": [{"line": int, "kind": str, "arguments": dict.fromkeys(_ARGUMENTS, object)}],
    "left_out": [[int, str]],
    "assumed": [[int, str]],
}
_NOT_COPIED = (".git", ".venv", "__pycache__", "node_modules")
_TABLES = toml_file.read(Path(__file__).with_name("machines.toml"))


@dataclass(frozen=True)
class Machine:
    """A machine to run the script for."""

    title: str
    gpu: bool
    variables: Mapping[str, str]
    cuda: str | None = None


MACHINES = tuple(Machine(**table) for table in _TABLES["machine"])


@dataclass(frozen=True)
class SetupRun:
    """The record of one run; see `recorder.py`.

    Attributes:
        error: The exception that ended the script, with its line; None for none.
    """

    machine: Machine
    error: str | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    architectures: str = ""
    extensions: Sequence[Mapping[str, Any]] = ()
    left_out: Sequence[tuple[int, str]] = ()
    assumed: Sequence[tuple[int, str]] = ()


def run_setup(setup: Path, words: Sequence[str] = (), sandbox: SandboxMode = "require") -> list[SetupRun]:
    """Run a `setup.py` as on each of `MACHINES`, with the `words` of `port`."""
    if not setup.is_file():
        hint = "name the setup.py of a project of torch.utils.cpp_extension"
        raise ConfigError("there is no such file", where=str(setup), hint=hint)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Za-z_]\w*=", word))
    arguments = [word for word in words if not re.match(r"[A-Za-z_]\w*=", word)]
    chosen = confinement.chosen(sandbox, None)
    with temporary_directory() as scratch:
        home = scratch / "cuda"
        tree = work_tree(setup.resolve().parent)
        root = _copy(tree, setup.resolve().parent, scratch / "project")
        for path, script in _TABLES["programs"].items():
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            (scratch / path).write_text(script.replace("COMPILED", str(scratch / "compiled")))
            (scratch / path).chmod(0o755)
        for name in ("python", "python3"):  # with which scripts generate sources
            (scratch / "bin" / name).symlink_to(sys.executable)
        request = {"script": str(root / setup.name), "root": str(root), "home": str(home), "arguments": arguments}
        return [_run(machine, request, variables, chosen, scratch, tree) for machine in MACHINES]


def _copy(tree: Path, directory: Path, to: Path) -> Path:
    """Copy a directory of a work tree, and link to the files beside it and its parents; return the copy."""
    copy = to / directory.relative_to(tree)
    shutil.copytree(directory, copy, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    (to / ".git").mkdir(exist_ok=True)  # scripts that find none expect the submodules of a source distribution
    for child in (directory, *directory.parents):
        if child == tree:
            break
        for entry in child.parent.iterdir():
            if entry != child and entry.name != ".git":
                (to / entry.relative_to(tree)).symlink_to(entry)
    return copy


def _run(
    machine: Machine,
    request: Mapping[str, Any],
    variables: Mapping[str, str],
    chosen: confinement.Confinement,
    scratch: Path,
    tree: Path,
) -> SetupRun:
    absent: list[str] = []
    home = request["home"]
    programs = [str(scratch / "bin"), *([f"{home}/bin"] if machine.cuda else [])]
    environment = {
        **{name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ},
        **({"CUDA_HOME": home, "CUDA_PATH": home} if machine.cuda else {}),
        "PATH": ":".join([*programs, "/usr/bin", "/bin"]),
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        **machine.variables,
        **variables,
    }
    while True:
        asked = {**request, "cuda": machine.cuda, "gpu": machine.gpu, "absent": absent}
        with TemporaryFile(dir=scratch) as output:
            recorder = [sys.executable, "-I", str(_RECORDER), json.dumps(asked)]
            command = chosen.around(recorder, scratch, [_RECORDER, tree])
            failed, log = confinement.run(command, scratch, environment, _SECONDS, output)
            output.seek(0)
            content = output.read(_LARGEST_RECORD + 1)
        shown = "".join(f": {line}" for line in log.splitlines()[-1:])
        record: Any = {"error": f"line 0: the process {failed or 'ended with status 0'}{shown}"}
        if content:
            record = {"error": "line 0: the script has changed its record, or the record is longer than 4 MB"}
            with suppress(ValueError, RecursionError):
                read = json.loads(content[:_LARGEST_RECORD])
                record = read if _is_plain(read) and has_form(read, _RECORD) else record
        missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", record["error"] or "")
        if missing is None or missing[1] in absent or len(absent) == 100:
            break
        absent.append(missing[1])
    return SetupRun(machine, **{key: record[key] for key in _RECORD if key in record})


def _is_plain(value: Any, depth: int = 20) -> bool:
    """Return whether a value can be written as UTF-8, and without deep recursion."""
    if isinstance(value, (dict, list)):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(item, depth - 1) for item in inner)
    return not isinstance(value, str) or value.isascii() or not re.search(r"[\ud800-\udfff]", value)
