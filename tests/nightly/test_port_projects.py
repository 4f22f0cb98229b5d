"""`kernel-builder port` and `setup.py build_ext` compile the same, in each project of the directory `PORT_PROJECTS`.

    PORT_PROJECTS=checkouts python -m pytest -m nightly tests/nightly/test_port_projects.py

The directory has git checkouts of projects with a `setup.py`. Each script runs with setuptools, Torch and compilers
that record their arguments, as on each machine of `port`. A source, flag, macro, include directory or capability of
these commands must be in the `build.toml` of `port`, or its output must name it; and `build.toml` has no others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from kernel_builder.config import compiler_flags
from kernel_builder.port.extension_table import PortedExtension, table_name
from kernel_builder.port.first_build_toml import Port, port
from kernel_builder.port.setup_runs import MACHINES
from kernel_builder.steps import confinement
from tests.support import programs
from tests.support.files import write_files, write_program
from tests.support.places import SOURCES

pytestmark = pytest.mark.nightly

PROJECTS = os.environ.get("PORT_PROJECTS")
SCRIPTS = [
    path
    for path in (sorted(Path(PROJECTS).glob("**/setup.py")) if PROJECTS else [])
    if re.search(r"C(pp|UDA)Extension", path.read_text(errors="replace"))
]
PROGRAM = Path(__file__).with_name("recorded_setup.py")
SECONDS = 600
COMPILERS = [prefix + name for prefix in ("", "x86_64-linux-gnu-") for name in ("c++", "g++", "cc", "gcc")]


@dataclass(frozen=True)
class Command:
    """A compile command: its source, and its options but for those that name files or the extension."""

    is_nvcc: bool
    source: str
    options: Counter[str]


Commands = Mapping[tuple[str, str], list[Command]]  # backend and name of an extension -> its commands


def recorded(script: Path, scratch: Path) -> list[Commands]:
    """Return the compile commands of a script on each machine."""
    checkout = next((path for path in script.parents if (path / ".git").exists()), script.parent)
    home = scratch / "cuda"
    for program in (home / "bin/nvcc", *(scratch / "bin" / name for name in COMPILERS)):
        write_program(program, SOURCES["recording_compiler"])
    write_program(scratch / "bin/git", f"echo {'0' * 40}")
    requests = []
    for number, machine in enumerate(MACHINES):
        root = scratch / f"machine{number}"
        shutil.copytree(checkout, root, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        (root / ".git").mkdir()
        path = [str(scratch / "bin"), *([f"{home}/bin"] if machine.cuda else []), f"{sys.prefix}/bin"]
        variables = {
            **({"CUDA_HOME": str(home), "CUDA_PATH": str(home)} if machine.cuda else {}),
            "PATH": ":".join([*path, "/usr/bin", "/bin"]),
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "TORCH_DONT_CHECK_COMPILER_ABI": "1",
            "MAX_JOBS": "1",
            "RECORDED_COMMANDS": f"{root}.commands",
            **machine.variables,
        }
        there = {"script": str(root / script.relative_to(checkout)), "output": f"{root}.output"}
        requests.append({**there, "cuda": machine.cuda, "gpu": machine.gpu, "home": str(home), "variables": variables})
    (scratch / "runs").write_text(json.dumps(requests))
    command = [sys.executable, str(PROGRAM), str(scratch / "runs")]
    around = confinement.chosen("require", None).around(command, scratch, [PROGRAM])
    programs.run(*around, cwd=scratch, timeout=SECONDS)
    directory = script.relative_to(checkout).parent
    return [_read(scratch / f"machine{number}.commands", directory) for number in range(len(MACHINES))]


def _read(file: Path, directory: Path) -> Commands:
    """Return the recorded commands, with paths relative to a directory of the checkout's copy."""
    root = str(file.with_suffix("") / directory)
    commands: dict[tuple[str, str], list[Command]] = {}
    text = file.read_text() if file.exists() else ""
    text = text.replace(f"{root}/", "").replace(root, ".").replace(str(file.parent / "cuda"), "CUDA_HOME")
    text = text.replace(str(file.with_suffix("")), "/".join(".." for _ in directory.parts))
    text = re.sub(r"/\S*?/site-packages/torch\b", "TORCH", text)
    for line in text.split("\037\n")[:-1]:
        compiler, extension, *words = line.split("\037")
        words = [word for word in words if word not in ("-c", "--c") and "TORCH_EXTENSION_NAME" not in word]
        for option in ("-o", "-MF", "--dependency-output", "-ccbin"):
            while option in words:
                at = words.index(option)
                del words[at : at + 2]
        source = [word for word in words if re.fullmatch(r"[^-].*\.(c|cc|cpp|cxx|cu)", word)][-1]
        words.remove(source)
        options = Counter(map(_normal, compiler_flags.options(words)))
        backend, name = extension.split(" ", 1)
        command = Command(compiler == "nvcc", os.path.normpath(source), options)
        commands.setdefault((backend, name), []).append(command)
    return commands


def _normal(option: Sequence[str]) -> str:
    """Return an option as one text, with one form of include directories."""
    match = re.fullmatch(r"-(?:I|isystem) ?(\S+)", " ".join(option))
    return f"-I{os.path.normpath(match[1])}" if match else " ".join(option)


def differences(ported: Port, runs: Sequence[Commands], known: Sequence[Counter[str]]) -> Iterator[str]:
    """Yield the differences between a port and the commands of setuptools that the port's output does not name."""
    output = " ".join(map(str, (*ported.left_out, *ported.notes, *ported.failed)))
    seen = set()
    for kernel in ported.kernels:
        number, commands = _commands_of(kernel, runs)
        sources = {command.source for command in commands}
        seen |= {(kernel.name, source) for source in sources}
        yield from _unequal(f"{kernel.name}: sources", sources, set(kernel.src), output)
        if "_write_ninja_file is replaced" in output:  # by a function that adds options to commands
            continue
        every = set[str]().union(*(command.options for command in commands))
        architectures = set()
        for is_nvcc, flags in ((False, kernel.cxx_flags), (True, kernel.cuda_flags)):
            own = [command.options for command in commands if command.is_nvcc == is_nvcc]
            real = set[str]().union(*(options - known[number] for options in own))
            architectures |= {option for option in real if re.search(r"(compute|sm)_\d", option)}
            translated = r"-DPy_LIMITED_API|-DTORCH_(TARGET_VERSION|API_INCLUDE)|-I(TORCH|CUDA_HOME)"
            real = {option for option in real - architectures if not re.match(translated, option)}
            here = {*map(_normal, compiler_flags.options(flags)), *(f"-I{path}" for path in kernel.include)}
            if own:
                yield from _unequal(f"{kernel.name}: {'nvcc' if is_nvcc else 'cxx'}", real, here, output, every)
        yield from _unequal(
            f"{kernel.name}: capabilities", _capabilities(architectures), set(kernel.capabilities), output
        )
    for run in runs:
        for (_, name), commands in run.items():
            for source in {command.source for command in commands}:
                if (table_name(name), source) not in seen and source not in output and name not in output:
                    yield f"{name}: {source} is compiled, and is in no table"


def _commands_of(kernel: PortedExtension, runs: Sequence[Commands]) -> tuple[int, list[Command]]:
    """Return the commands of the machine that a table is for, and the machine's number."""
    order = (1, 0, 2) if kernel.backend == "cuda" else (2, 0, 1)
    # A CUDAExtension without CUDA sources is an extension for the CPU to setuptools.
    for wanted, number in product(dict.fromkeys((kernel.backend, "cpu")), order):
        named = [
            commands
            for (backend, name), commands in runs[number].items()
            if table_name(name) == kernel.name and backend == wanted
        ]
        if named:  # modules of several packages can have the same name
            sources = {*kernel.src}
            return number, max(named, key=lambda commands: len({command.source for command in commands} & sources))
    return 0, []


def _unequal(what: str, real: set[str], ported: set[str], output: str, known: Iterable[str] = ()) -> Iterator[str]:
    for item in sorted(real - ported):
        if re.sub("^-[ID]", "", item) not in output:
            yield f"{what}: lost {item}"
    for item in sorted(ported - real - {*known}):
        yield f"{what}: added {item}"


def _capabilities(options: set[str]) -> set[str]:
    """Return the capabilities of options such as `-gencode arch=compute_90,code=sm_90`."""
    found: dict[str, bool] = {}
    for option in options:
        code = option.partition(",code=")[2] or option.replace("sm_", "compute_")
        for kind, number in re.findall(r"(sm|compute|lto)_(\d+[af]?)", code):
            found[number] = found.get(number, False) or kind == "compute"
    dotted = {re.sub(r"(\d)([af]?)$", r".\1\2", number): ptx for number, ptx in found.items()}
    return {number + ("+PTX" if ptx and number[-1].isdigit() else "") for number, ptx in dotted.items()}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> list[Counter[str]]:
    """The options that setuptools and Torch add to commands, on each machine."""
    directory = tmp_path_factory.mktemp("known")
    write_files(directory, {"project/setup.py": SOURCES["setup_without_options"]})
    options = []
    for commands in recorded(directory / "project/setup.py", directory):
        options.append(Counter[str]())
        for command in (command for listed in commands.values() for command in listed):
            options[-1] |= command.options
    return options


@pytest.mark.skipif(not SCRIPTS, reason="PORT_PROJECTS is no directory of checkouts")
@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_build_toml_has_what_setuptools_compiles(script: Path, known: Sequence[Counter[str]], tmp_path: Path) -> None:
    runs = recorded(script, tmp_path)
    if not any(runs):  # it needs variables, or modules that are not installed
        pytest.skip("setup.py compiles nothing here")
    assert not list(differences(port(script), runs, known))
