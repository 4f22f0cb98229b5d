"""Keys of steps and binaries depend on everything that determines the bytes, and on nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.steps.graph import Binary, Graph
from kernel_builder.steps.plan import plan
from kernel_builder.toolchain import Toolchains
from tests.support.files import append, replace
from tests.support.newest import BEFORE, CUDA_13, NEWEST, full_abi
from tests.support.places import CPU

CUDA = full_abi(NEWEST, CUDA_13)
SOURCE_CUDA = "scale/scale_cuda.cu"

Copy = Callable[..., Path]


def graph(directories: Iterable[Path], *variants: str) -> Graph:
    wanted = [Variant.parse(name) for name in variants or (CPU,)]
    return plan([(read_project(directory), wanted) for directory in directories], Toolchains())


def binary(directory: Path) -> Binary:
    (only,) = graph([directory]).binaries
    return only


def keys(of: Binary) -> dict[str, str]:
    return {step.source: step.key for step in of.objects}


BINDING, SOURCE, HEADER = "torch-ext/torch_binding.cpp", "scale/scale_cpu.cpp", "scale/scale.h"
LANGUAGE = 'language = "cpp-cpu"'


def test_one_more_torch_release_compiles_its_binding_only(copy_project: Copy) -> None:
    planned = graph([copy_project("full-scale")], full_abi(BEFORE, CUDA_13), CUDA)
    assert sorted(step.source for step in planned.compiles) == [SOURCE_CUDA, BINDING, BINDING]


def test_steps_depend_on_the_files_that_they_read_and_the_binary_on_build_toml(copy_project: Copy) -> None:
    directory = copy_project("stable-scale")
    before = binary(directory)
    (directory / "scale" / "other.h").write_text("int other;")
    (directory / "README.md").write_text("words")
    append(directory / "scale" / "scale_cuda.cu", "\n")
    assert binary(directory) == before, "files that no step reads"
    for file, changed in ((BINDING, {BINDING}), (SOURCE, {BINDING, SOURCE}), (HEADER, {BINDING, SOURCE})):
        append(directory / file, "\n")
        after = binary(directory)
        assert {source for source in (BINDING, SOURCE) if keys(before)[source] != keys(after)[source]} == changed, file
        assert before.module != after.module and before.key != after.key, file
        before = after
    shutil.copytree(directory / "torch-ext" / "stable_scale", directory / "torch-ext" / "table_scale")
    for old, new in (
        ("version = 1", "version = 2"),
        ('"stable-scale"', '"table-scale"'),
        (LANGUAGE, f'{LANGUAGE}\ncxx-flags = ["-O2"]'),
    ):
        replace(directory / "build.toml", old, new)
        after = binary(directory)
        assert before.module != after.module, new
        before = after


@pytest.mark.parametrize("flag", ["-std=c++17", "--std=gnu++1z", "-std=c++2a"])
def test_a_standard_older_than_torchs_headers_need_is_left_out(copy_project: Copy, flag: str) -> None:
    directory = copy_project("full-scale")
    declaration = directory / "build.toml"
    source = directory / "scale" / "scale_cuda.cu"
    source.write_text("#include <ATen/ATen.h>\n" + source.read_text())
    declaration.write_text(f'{declaration.read_text()}cuda-flags = ["{flag}"]\n')
    (planned,) = graph([directory], CUDA).binaries
    (step,) = (step for step in planned.objects if step.source == "scale/scale_cuda.cu")
    kept = {flag} if flag[-2:] in {"2a", "23"} else set()
    assert {part for part in step.argv if "std=" in part} == kept | {"-std=c++20"}


def test_flags_and_definitions_of_a_cuda_variants_sources(copy_project: Copy) -> None:
    """As in the public builder, flags for C++ sources are not for nvcc: they may name options that it does not have."""
    directory = copy_project("full-scale")
    declaration = directory / "build.toml"
    (directory / "scale" / "more.cpp").write_text("int more;\n")
    listed = declaration.read_text().replace(
        'src = ["scale/scale_cuda.cu"', 'src = ["scale/more.cpp", "scale/scale_cuda.cu"'
    )
    declaration.write_text(f'{listed}cxx-flags = ["-DFOR_CPP"]\ncuda-flags = ["-DFOR_CUDA"]\n')
    (planned,) = graph([directory], CUDA).binaries
    looked_for = {"-DFOR_CPP", "-DFOR_CUDA", "-DCUDA_KERNEL", "-DUSE_CUDA", "-DENABLE_FP8"}
    assert {step.source: looked_for & set(step.argv) for step in planned.objects} == {
        "torch-ext/torch_binding.cpp": {"-DCUDA_KERNEL", "-DUSE_CUDA"},
        "scale/more.cpp": {"-DCUDA_KERNEL", "-DUSE_CUDA", "-DFOR_CPP"},
        SOURCE_CUDA: {"-DCUDA_KERNEL", "-DUSE_CUDA", "-DENABLE_FP8", "-DFOR_CUDA"},
    }
