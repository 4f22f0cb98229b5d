"""Sources that do not compile, link or load are reported with their file; other variants and projects are built."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kernel_format.errors import BuildError, CheckError
from tests.integration.build_command.conftest import FOR_CPU, RIGHT, Copy, Run, command, untouched
from tests.support.files import replace
from tests.support.places import CPU

CALLER = ", in scale/scale_cpu.cpp"
FACET = "_ZNSt7codecvtIDsDu11__mbstate_tE2idE"
GLIBC = tuple(int(part) for part in (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0").split()[1].split("."))


def test_a_compile_error(project: Path, kernel_builder: Run) -> None:
    """The error names the file and the variant, and has the command and the output of the compiler."""
    source, undeclared = project / "scale" / "scale_cpu.cpp", "‘input’ was not declared"
    replace(source, "factor * in[i]", "factor * input[i]")
    done = kernel_builder.refuse(project, *FOR_CPU, expected=(BuildError, source, CPU, None))
    assert re.search(rf"compiler failed: scale/scale_cpu\.cpp:4:\d+: error: {undeclared}", done.answer["message"])
    assert "scale/scale_cpu.cpp:4" in done.answer["output"] and undeclared in done.answer["output"]
    assert "g++ -c " in done.answer["command"]
    people = command(kernel_builder.cache, "build", project, *FOR_CPU)
    assert people.returncode == 5 and "failed" in people.stdout
    # The compiler's message comes first; the command is in a log.
    assert CPU in people.stderr and people.stderr.index(undeclared) < people.stderr.index(f"error: {source}")
    assert "g++ -c " not in people.stderr
    (log,) = re.findall(r"all of its output: (.*)", people.stderr)
    assert "g++ -c " in Path(log).read_text()
    replace(source, "factor * input[i]", "factor * in[i]")
    # Two compiles: the source, and the binding, whose namespace is a digest that includes the source.
    assert kernel_builder.build(project, *FOR_CPU)["compiles"] == 2


def test_several_compile_errors_are_all_reported_and_another_project_is_built(
    copy_project: Copy, project: Path, cache: Path, kernel_builder: Run
) -> None:
    good = copy_project("python-only")
    replace(project / "scale" / "scale_cpu.cpp", "factor * in[i]", "factor * input[i]")
    replace(project / "torch-ext" / "torch_binding.cpp", "Tensor in,", "Tensir in,")
    with untouched(project):
        done = kernel_builder(cache, "build", good, project, "--backend", "cpu", "--no-load", "--jobs", "1")
    assert (done.code, done.answer["error"]) == (5, "SeveralErrors")
    (failed,) = done.answer["failures"]
    assert failed["outdated"]
    assert {Path(error["where"]).name for error in failed["errors"]} == {"scale_cpu.cpp", "torch_binding.cpp"}
    assert not (cache / "binaries").exists() or not list((cache / "binaries").rglob("*.so"))
    assert [(built["project"], built["status"]) for built in done.answer["packages"]] == [("python-only", "built")]
    assert list((good / "build").glob("*/metadata.json"))


@pytest.mark.parametrize(
    ("header", "advice"),
    [
        ("scale/lost.h", "{} is neither in the project nor in the headers of this variant"),
        ("no_such_header", "the C++ library of this compiler has no <{}>: do not include"),
    ],
)
def test_a_missing_header(project: Path, shared_cache: Path, kernel_builder: Run, header: str, advice: str) -> None:
    source = project / "scale" / "scale_cpu.cpp"
    replace(source, "#include", f"#include <{header}>\n#include")
    expected = (BuildError, source, CPU, advice.format(header))
    kernel_builder.refuse(project, *FOR_CPU, cache=shared_cache, expected=expected)


@pytest.mark.parametrize(
    ("declaration", "call", "error", "message"),
    [
        ("float lost(float);", "lost(in[i])", CheckError, "lost"),
        (
            *('extern "C" float omp_alloc(float);', "omp_alloc(in[i])", BuildError),
            f"needs 1 symbol newer than glibc 2.28, GLIBCXX_3.4.24 and Torch's libgomp (GOMP_5.0), for {CPU}:\n"
            f"  omp_alloc (OMP_5.0.1){CALLER}",
        ),
        pytest.param(
            f'extern "C" unsigned arc4random(); extern float facet __asm__("{FACET}");',
            *("arc4random() + facet", BuildError),
            f"for {CPU}:\n  std::codecvt<char16_t, char8_t, __mbstate_t>::id (GLIBCXX_3.4.26){CALLER}\n"
            f"  arc4random (GLIBC_2.36){CALLER}",
            marks=pytest.mark.skipif(GLIBC < (2, 36), reason="this machine's own C library does not have it"),
        ),
    ],
)
def test_undefined_and_too_new_symbols_are_reported(
    project: Path, shared_cache: Path, kernel_builder: Run, declaration: str, call: str, error: Any, message: str
) -> None:
    source = project / "scale" / "scale_cpu.cpp"
    replace(source, "void scale(", f"{declaration}\nvoid scale(")
    replace(source, "factor * in[i]", call)
    done = kernel_builder.refuse(project, *FOR_CPU, cache=shared_cache, expected=(error, "", message, ""))
    assert CPU in done.answer["message"]


def test_a_failed_step_can_be_run_again(project: Path, kernel_builder: Run) -> None:
    """KERNEL_BUILDER_DEBUG=keep keeps work directories."""
    source = project / "scale" / "scale_cpu.cpp"
    replace(source, RIGHT, "out[i] = unknown * in[i]")
    expected = (BuildError, source, "unknown", None)
    done = kernel_builder.refuse(project, *FOR_CPU, expected=expected, KERNEL_BUILDER_DEBUG="keep")
    assert "the sandbox is off, so compilers and packages run without one (KERNEL_BUILDER_DEBUG=keep)" in done.stderr
    (work,) = (Path(name) for name in re.findall(r"^kept: (.*/work/[\w-]+)$", done.stderr, re.M))
    (copied,) = work.glob("*/inside/src/scale/scale_cpu.cpp")
    failed = copied.parents[3]
    replace(copied, "unknown", "factor")
    subprocess.run(["sh", "../command"], check=True, cwd=failed / "inside")
    assert (failed / "inside/out.o").exists()

    cache = kernel_builder.cache
    kernel_builder.refuse(project, *FOR_CPU, expected=expected, KERNEL_BUILDER_DEBUG="keep")
    assert len(list((cache / "work").iterdir())) == 2
    kernel_builder.refuse(project, *FOR_CPU, expected=expected)
    assert not list((cache / "work").glob("*")), "a build without the variable removes them"
