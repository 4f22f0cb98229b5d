"""Sources that do not compile, link or load are reported with their file, and the project stays unchanged."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import CPU
from tests.e2e.conftest import (
    BUILDER,
    Copy,
    Run,
    assert_refused,
    environment,
    replace,
    untouched,
)

GLIBC = tuple(int(part) for part in (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0").split()[1].split("."))


def test_a_compile_error(project: Path, cache: Path, kernel_builder: Run) -> None:
    """The error names the file and the variant, and has the command and the output of the compiler."""
    source = project / "scale" / "scale_cpu.cpp"
    replace(source, "factor * in[i]", "factor * input[i]")
    arguments = ("build", project, "--variant", CPU)
    with untouched(project):
        done = kernel_builder(cache, *arguments, "--compiler-cache", "off")
        people = subprocess.run(
            [BUILDER, *arguments], capture_output=True, text=True, env=environment(cache), check=False
        )
    assert_refused(done, 5, "BuildError", where=str(source), message=CPU, hint=None)
    assert "scale/scale_cpu.cpp:4" in done.answer["output"]
    assert "‘input’ was not declared" in done.answer["output"]
    assert "g++ -c " in done.answer["command"]
    assert people.returncode == 5
    assert people.stdout == ""
    for words in (f"error: {source}", CPU, "command: ", "‘input’ was not declared"):
        assert words in people.stderr
    replace(source, "factor * input[i]", "factor * in[i]")
    repaired = kernel_builder(cache, *arguments, "--no-load")
    # Two compiles: the source, and the binding, whose namespace is a digest that includes the source.
    assert (repaired.code, repaired.answer["compiles"]) == (0, 2)


def test_of_several_compile_errors_one_is_reported_and_nothing_is_linked(
    project: Path, cache: Path, kernel_builder: Run
) -> None:
    replace(project / "scale" / "scale_cpu.cpp", "factor * in[i]", "factor * input[i]")
    replace(project / "torch-ext" / "torch_binding.cpp", "Tensor in,", "Tensir in,")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU, "--jobs", "2")
    assert_refused(done, 5, "BuildError", where=str(project), message=CPU, hint=None)
    assert not (cache / "binaries").exists() or not list((cache / "binaries").rglob("*.so"))


def test_one_bad_project_of_two_stops_both(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    good, bad = copy_project("python-only"), copy_project("stable-scale")
    replace(bad / "scale" / "scale_cpu.cpp", "factor * in[i]", "factor * input[i]")
    with untouched(good, bad):
        done = kernel_builder(cache, "build", good, bad, "--backend", "cpu")
    assert_refused(done, 5, "BuildError", where=str(bad), message=CPU, hint=None)


@pytest.mark.parametrize("header", ["scale/lost.h", "cutlass/cutlass.h"])
def test_a_missing_header(project: Path, cache: Path, kernel_builder: Run, header: str) -> None:
    source = project / "scale" / "scale_cpu.cpp"
    replace(source, "#include", f"#include <{header}>\n#include")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU)
    hint = f"{header} is neither in the project nor in the headers of this variant"
    assert_refused(done, 5, "BuildError", where=str(source), message=CPU, hint=hint)


@pytest.mark.parametrize(
    ("declaration", "call", "code", "error", "words"),
    [
        ("float lost(float);", "lost(in[i])", 7, "CheckError", "lost"),
        ('extern "C" float omp_alloc(float);', "omp_alloc(in[i])", 5, "BuildError", "omp_alloc (OMP_5.0.1)"),
        pytest.param(
            'extern "C" unsigned arc4random();',
            "arc4random()",
            5,
            "BuildError",
            "arc4random (GLIBC_2.36)",
            marks=pytest.mark.skipif(GLIBC < (2, 36), reason="this machine's own C library does not have it"),
        ),
    ],
)
def test_undefined_and_too_new_symbols_are_reported(
    project: Path, cache: Path, kernel_builder: Run, declaration: str, call: str, code: int, error: str, words: str
) -> None:
    source = project / "scale" / "scale_cpu.cpp"
    replace(source, "void scale(", f"{declaration}\nvoid scale(")
    replace(source, "factor * in[i]", call)
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU)
    assert done.code == code, done
    assert done.answer["error"] == error
    assert words in done.answer["message"]
    assert CPU in done.answer["message"]
    assert done.answer["hint"]


def test_a_package_that_does_not_load_is_not_installed(project: Path, cache: Path, kernel_builder: Run) -> None:
    """A package that cannot be imported does not replace the old one."""
    (project / "torch-ext" / "stable_scale" / "__init__.py").write_text("from . import lost\n")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU)
    assert_refused(done, 7, "CheckError", where=str(project), message="lost", hint="is unchanged")
