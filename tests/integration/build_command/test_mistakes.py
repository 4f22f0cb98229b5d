"""Mistakes of authors: one finding for each, with the author's file and line.

One command builds all projects, so that Torch is imported once. Each project of C++ compiles one small binding.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from kernel_builder.toolchain import Toolchains
from tests.integration.build_command.conftest import BUILDER
from tests.integration.build_command.mistaken_projects import (
    BINDING,
    COMPILED,
    IN_PYTHON,
    WITHOUT_PYTHON,
    compiled,
    in_python,
)
from tests.support.places import CPU


@pytest.fixture(scope="module")
def findings_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[tuple[str, str, str]]]:
    """Return the findings in a project: severity, then check, path and message, then the advice."""
    root = tmp_path_factory.mktemp("mistakes")
    cache = root / "cache"
    cache.mkdir()
    (cache / "toolchains").symlink_to(Toolchains().store.root, target_is_directory=True)
    for name, (binding, init) in COMPILED.items():
        compiled(root, name, binding, init)
    for name, files in IN_PYTHON.items():
        in_python(root, name, files)
    command = [BUILDER, "build", *(root / name for name in (*COMPILED, *IN_PYTHON)), "--backend", "cpu", "--json"]
    environment = {**os.environ, "KERNEL_BUILDER_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    answer: dict[str, Any] = json.loads(done.stdout)
    reports = {outcome["project"]: outcome["checks"] for outcome in (*answer["failures"], *answer["packages"])}
    errors = {failed["project"]: failed["errors"] for failed in answer["failures"]}

    def of(name: str) -> list[tuple[str, str, str]]:
        if reports[name] is None:
            return [("error", error["message"], error["hint"]) for error in errors[name]]
        findings = reports[name]["findings"]
        assert str(root) not in json.dumps(findings), "a directory that is gone"
        return [(f["severity"], f"{f['check']}: {f['path']}: {f['message']}", f["hint"]) for f in findings]

    return of


FindingsOf = Callable[[str], list[tuple[str, str, str]]]


def test_ops_that_are_registered_wrongly(findings_of: FindingsOf) -> None:
    def without(severity: str, op: str, line: int, others: str) -> tuple[str, str, str]:
        return (
            severity,
            f"ops: {BINDING}: line {line}: {op} has no implementation for CPU, {others}",
            "register one under CPU, by the same name; or define the op only where it is implemented: "
            "#if defined(CPU_KERNEL)",
        )

    init = "torch-ext/registered/__init__.py"
    assert findings_of("registered") == [
        (
            "error",
            f"op-namespace: {init}: line 24: torch.ops.registered has no ops: the namespace of a package is unique to "
            "its build",
            "take `ops` from `._ops`: `from ._ops import ops`",
        ),
        without("error", "elsewhere", 10, "only for CUDA"),
        without("warning", "lost", 9, "nor for another backend"),
        without("warning", "on_gpus", 14, "nor for another backend"),
        (
            "warning",
            f"ops: {BINDING}: line 12: untraced has no fake, so torch.compile fails at it",
            'add one in Python: @torch.library.register_fake(add_op_namespace_prefix("untraced"))',
        ),
    ]


@pytest.mark.parametrize(
    ("project", "check", "message", "hint"),
    [
        (
            "pinned",
            "ops",
            "line 8: scaled is registered in the fixed namespace 'pinned_ops': two versions of the kernel could not be "
            "loaded in one process",
            "write TORCH_EXTENSION_NAME instead: TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops)",
        ),
        ("miskeyed", "load", "was killed by SIG", "schemas and keys of registered ops"),
    ],
)
def test_the_load_reports_registrations_that_torch_refuses(
    findings_of: FindingsOf, project: str, check: str, message: str, hint: str
) -> None:
    ((severity, text, advice),) = findings_of(project)
    assert severity == "error"
    assert text.startswith(f"{check}: ") and message in text
    assert hint in advice


def test_functions_are_compared_with_their_schemas(findings_of: FindingsOf) -> None:
    """Torch compares nothing on the stable ABI."""

    def errors(project: str) -> list[tuple[str, str]]:
        assert {severity for severity, _, _ in findings_of(project)} == {"error"}
        return [(message.removeprefix(f"ops: {BINDING}: "), hint) for _, message, hint in findings_of(project)]

    def made(of_function: str, of_schema: str) -> str:
        return f"make it {of_function}, which {of_schema} of a schema is in C++: Torch does not convert it"

    assert errors("typed") == [
        ("line 20: scaled takes argument 2 as float, in the schema of scaled it is float", made("double", "float")),
        (
            "line 21: counted takes argument 2 as optional<double>, in the schema of counted it is int?",
            made("std::optional<int64_t>", "int?"),
        ),
        ("line 21: counted takes argument 3 as int32_t, in the schema of counted it is int", made("int64_t", "int")),
        ("line 22: mean returns its result as float, in the schema of mean it is float", made("double", "float")),
        (
            "line 24: both takes argument 2 as int64_t, in the schema of both.by it is float",
            made("double", "float"),
        ),
    ]
    assert errors("written") == [
        (
            "line 14: scaled takes argument 2 as double, in the schema of taken it is int",
            made("int64_t", "int"),
        ),
        (
            "line 15: scaled takes 2 of the 3 arguments of more",
            "make them equal: Torch passes the arguments of the schema, also those with default values",
        ),
        ("line 16: there is an implementation of numberz, which no schema defines", "did you mean numbers?"),
    ]


LOAD = "the client cannot load the package: "


@pytest.mark.parametrize(
    ("project", "message", "hint"),
    [
        (
            "throwing",
            f"load: torch-ext/throwing/__init__.py: {LOAD}the process was killed by SIGABRT: std::runtime_error: no "
            "table",
            "look at code that runs at load: static initializers, and schemas and keys of registered ops",
        ),
        (
            "data",
            f"load: torch-ext/data/__init__.py: {LOAD}FileNotFoundError: [Errno 2] No such file or directory: "
            "'build/torch-cpu/table.json'",
            "add the ending of the file to `pyext` in build.toml: the package has only these files",
        ),
        (
            "device",
            f"load: torch-ext/device/__init__.py: {LOAD}AssertionError: Torch not compiled with CUDA enabled",
            "ask for the device in the function that needs it",
        ),
        (
            "misnamed",
            f"load: torch-ext/misnamed/__init__.py: {LOAD}RuntimeError: operator MODULE::doubld does not exist",
            "run `python -m kernel_builder.checks.probe load DIR` on the package to see the full message",
        ),
    ],
)
def test_a_mistake_has_one_finding(findings_of: FindingsOf, project: str, message: str, hint: str) -> None:
    (finding,) = findings_of(project)
    severity, text, advice = finding
    name = project.replace("-", "_")
    text = re.sub(rf"_{name}_c[^.:' ]*", "MODULE", text)
    assert (severity, text, advice) == ("error", message, hint)


def test_a_binding_by_pybind11(findings_of: FindingsOf) -> None:
    ((_, message, hint),) = findings_of("ported")
    assert message == (
        f"the compiler failed: {BINDING}:1:10: fatal error: torch/extension.h: No such file or directory, for {CPU}"
    )
    assert hint == (
        "register the ops by STABLE_TORCH_LIBRARY_EXPAND and REGISTER_EXTENSION of registration.h, and include "
        f"torch/csrc/stable/library.h, {WITHOUT_PYTHON}"
    )


def test_a_binding_by_pybind11_on_the_full_abi(findings_of: FindingsOf) -> None:
    """The compiler stops at the first header of Python's, and does not print 1,800 errors in those of pybind11."""
    for _, message, hint in findings_of("ported-full"):
        assert message.startswith(f"the compiler failed: {BINDING}:1: ")
        assert "fatal error: Python.h: No such file or directory, for torch2" in message
        assert "toolchains" not in message
        assert hint == (
            "register the ops by TORCH_LIBRARY_EXPAND and REGISTER_EXTENSION of registration.h, and include "
            f"torch/library.h or torch/all.h, {WITHOUT_PYTHON}"
        )


def test_a_sound_project_has_no_findings(findings_of: FindingsOf) -> None:
    assert findings_of("sound") == []


def test_a_binding_without_the_header_of_its_macros(findings_of: FindingsOf) -> None:
    ((_, message, hint),) = findings_of("unincluded")
    assert f"compiler failed: {BINDING}:6:" in message
    assert "expected constructor, destructor, or type conversion before" in message
    assert hint == (
        "STABLE_TORCH_LIBRARY_EXPAND is not defined: include registration.h, which the builder provides, and "
        "torch/csrc/stable/library.h"
    )
