"""Fixtures of the tests that compare our reader of build.toml with the public parser.

That is the parser of client 0.17.2, which reads edition 5. Our reader rejects every file that the public parser
rejects. It accepts the other files, or rejects them for a reason that `cases.toml` lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kernels._rust import Backend, Build, KernelVersion

from kernel_builder import toml_file
from kernel_builder.config import build_toml, known_backends, project
from kernel_builder.config.project_files import read_project
from tests.support.files import write_files

GENERAL = {"name": '"a-b"', "version": "1", "edition": "5", "license": '"apache-2.0"', "backends": '["cpu", "cuda"]'}
TORCH = '[torch]\nsrc = ["torch-ext/binding.cpp"]\n'
CPU = '[kernel.c]\nbackend = "cpu"\ndepends = ["torch"]\nsrc = ["a.cpp"]\n'
CUDA = '[kernel.g]\nbackend = "cuda"\ndepends = ["torch"]\nsrc = ["a.cu"]\n'
# Names of projects. The fixture `home` has a Python package for each.
NAMES = ("a-b", "ab", "a1", "a--b", "a-" + "b" * 40)


def general(**changes: str | None) -> str:
    """Return a valid file with these keys of [general] changed, or removed if None. `_` in a key means `-`."""
    keys = {**GENERAL, **{key.replace("_", "-"): value for key, value in changes.items()}}
    lines = "".join(f"{key} = {value}\n" for key, value in keys.items() if value is not None)
    return f"[general]\n{lines}{TORCH}{CPU}{CUDA}"


def framework(text: str) -> str:
    """Return a valid file with `text` in place of [torch]."""
    return general().replace(TORCH, text + "\n")


def torch(line: str) -> str:
    """Return a valid file with `line` as the only line of [torch]."""
    return framework(f"[torch]\n{line}")


def kernel(backend: str, *lines: str, depends: str = '["torch"]', src: str = '["a.cpp"]', name: str = "x") -> str:
    """Return a valid file with one more kernel."""
    more = "\n".join(lines)
    return f'{general()}[kernel.{name}]\nbackend = "{backend}"\ndepends = {depends}\nsrc = {src}\n{more}\n'


def more(text: str) -> str:
    """Return a valid file followed by `text`."""
    return general() + text


def texts(cases: Mapping[str, Any]) -> list[str]:
    """Return the files of a table of `cases.toml`, which says how their entries change a valid file."""
    changed = ({key: value or None for key, value in keys.items()} for keys in cases.get("general", ()))
    kernels = ({"lines": (), **entry} for entry in cases.get("kernel", ()))
    return [
        *(general(**keys) for keys in changed),
        *map(torch, cases.get("torch", ())),
        *map(framework, cases.get("framework", ())),
        *(kernel(entry.pop("backend"), *entry.pop("lines"), **entry) for entry in kernels),
        *map(more, cases.get("more", ())),
    ]


CASES = toml_file.read(Path(__file__).with_name("cases.toml"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project directory with every file that the tested build.toml files name."""
    packages = [f"torch-ext/{project.python_name(name)}" for name in NAMES] + ["tvm-ffi-ext/a_b"]
    files = ["a.cpp", "a.cu", "inc/a.h", "Cargo.toml", "Cargo.lock", "lib.rs", "torch-ext/binding.cpp"]
    return write_files(
        tmp_path_factory.mktemp("project"), [*files, *(f"{package}/__init__.py" for package in packages)]
    )


def theirs(home: Path) -> Build | None:
    """Return the project as the public parser reads it, or None if it rejects the file."""
    try:
        return Build.open(home)
    except ValueError:
        return None


def in_edition_6(text: str) -> str:
    """Return a file of edition 5 with the tags of edition 6, whether or not it is valid."""
    return re.sub(r"\bbackend = (['\"]?)(?=\w)", r"language = \1cpp-", text.replace("edition = 5", "edition = 6"))


def write(home: Path, text: str) -> None:
    (home / build_toml.FILE).write_bytes(text.encode())


def assert_same_values(home: Path) -> None:
    """Assert that we read the same values as the public parser, as far as it exposes them."""
    build, mine = theirs(home), read_project(home)
    assert build is not None
    assert list(map(str, mine.backends)) == list(dict.fromkeys(str(backend) for backend in build.general.backends))
    for backend in known_backends.NAMES:
        expected = [
            (
                dependency.repo_id,
                dependency.version.version if isinstance(dependency.version, KernelVersion.Version) else None,
                dependency.version.revision if isinstance(dependency.version, KernelVersion.Revision) else None,
            )
            for dependency in build.all_kernel_depends(Backend.from_str(backend))
        ]
        dependencies = (*mine.kernel_depends, *mine.backend_kernel_depends.get(known_backends.get(backend), ()))
        assert [(d.repo_id, d.version, d.revision) for d in dependencies] == expected
