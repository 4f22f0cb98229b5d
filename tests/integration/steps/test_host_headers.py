"""clang finds the headers of g++ and of the C library wherever they are, and their place changes no byte."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_builder.backends.tools import HostCompiler
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.steps import compile_steps, files_read
from kernel_builder.steps.confinement import Confinement
from kernel_builder.steps.graph import CompileStep
from kernel_builder.steps.step_scripts import stage_compile
from kernel_builder.toolchain import Toolchains, host_compiler
from tests.support import files
from tests.support.places import CPU, CUDA, SOURCES


def clang_step(directory: Path, toolchains: Toolchains) -> CompileStep:
    variant = Variant.parse(CUDA.replace("cu130", "cu126"))
    steps = compile_steps.drafts(read_project(directory), variant, toolchains)
    return next(step for step in steps if step.compiler.name == "clang")


def compiled(step: CompileStep, work: Path) -> tuple[bytes, list[Path]]:
    """Return the object, and the machine's headers that it is made from, all of which the step may read."""
    work.mkdir()
    stage_compile(step, work / step.key, threads=1, confinement=Confinement())
    subprocess.run(["sh", f"{step.key}/run.sh"], cwd=work, env=host_compiler.environment(), check=True)
    read = [Path(name) for name in files_read.listed(work / step.key) if name.startswith("/")]
    others = [work, *step.roots.values(), *(root.resolve() for root in step.roots.values())]
    headers = [path for path in read if not any(map(path.is_relative_to, others))]
    assert files_read.foreign(map(str, headers), step.headers) == []
    return (work / step.key / "out.o").read_bytes(), headers


def with_headers_in(elsewhere: Path, headers: Iterable[Path], host: HostCompiler, program: Path) -> None:
    """Write a g++ whose headers, except its own few, are copied below a directory, as Nix's wrapper of g++ is.

    Those of `asm` are links, as in Debian 13.
    """
    (elsewhere / "asm").mkdir(parents=True)
    for header in headers:
        copied = Path(f"{elsewhere}{header}")
        copied.parent.mkdir(parents=True, exist_ok=True)
        if copied.parent.name == "asm":
            copied.symlink_to(elsewhere / "asm" / copied.name)
        shutil.copy(header, copied)
    searched = [*host.cxx_include, f"{host.install}/include", *host.c_include]
    places = [
        directory if directory.startswith(str(host.install)) else f"{elsewhere}{os.path.normpath(directory)}"
        for directory in searched
    ]
    options = shlex.join(["-nostdinc", *(word for place in places for word in ("-isystem", place))])
    files.write_program(program, f'exec {host.path} {options} "$@"')


def test_headers_of_gxx_in_another_place(
    copy_project: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, elsewhere = copy_project("stable-scale"), tmp_path / "elsewhere"
    files.replace(directory / "build.toml", '["9.0"]', '["9.0"]\ncuda-flags = ["-lineinfo"]')
    files.append(directory / "scale/scale_cuda.cu", SOURCES["host_and_device_code"])
    toolchains = Toolchains()
    usual = clang_step(directory, toolchains)
    expected, headers = compiled(usual, tmp_path / "usual")
    with_headers_in(elsewhere, headers, toolchains.host(), tmp_path / "g++")

    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    moved = clang_step(directory, Toolchains())
    assert moved.key == usual.key
    links = {token: tmp_path / f"tree-{number}" for number, token in enumerate(moved.roots)}
    for token, link in links.items():
        link.symlink_to(moved.roots[token], target_is_directory=True)
    compiled_object, read = compiled(replace(moved, roots=links), tmp_path / "moved")
    assert compiled_object == expected
    assert read
    assert all(header.is_relative_to(elsewhere) for header in read)


def test_links_to_headers_of_the_kernel(
    copy_project: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """clang lists the name of a header that is a link; g++ lists where the link leads, if that is shorter."""
    project, elsewhere, toolchains = read_project(copy_project("stable-scale")), tmp_path / "elsewhere", Toolchains()
    variant = Variant.parse(CPU)
    usual = compile_steps.drafts(project, variant, toolchains)[0]
    expected, headers = compiled(usual, tmp_path / "usual")
    with_headers_in(elsewhere, headers, toolchains.host(), tmp_path / "g++")
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    compiled_object, read = compiled(compile_steps.drafts(project, variant, Toolchains())[0], tmp_path / "moved")
    assert compiled_object == expected
    assert elsewhere / "asm" in {header.parent for header in read}
