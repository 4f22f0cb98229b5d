"""What names a step and a binary: all that determines the bytes, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kernel_builder.build.plan import PLACEHOLDER, Binary, Graph, plan
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.toolchain import Toolchains
from tests.conftest import CPU

Copy = Callable[..., Path]


def graph(directories: Iterable[Path], *variants: str, is_split: Callable[[str], bool] = lambda key: False) -> Graph:
    wanted = [Variant.parse(name) for name in variants or (CPU,)]
    return plan([(read_project(directory), wanted) for directory in directories], Toolchains(), is_split)


def binary(directory: Path) -> Binary:
    (only,) = graph([directory]).binaries
    return only


def keys(of: Binary) -> dict[str, str]:
    return {step.source: step.key for step in of.objects}


BINDING, SOURCE, HEADER = "torch-ext/torch_binding.cpp", "scale/scale_cpu.cpp", "scale/scale.h"
PYTHON = "torch-ext/stable_scale/__init__.py"


def test_equal_steps_are_one(copy_project: Copy) -> None:
    """Over variants that one binary serves, and over projects wherever they lie."""
    one, two = copy_project("stable-scale", "one"), copy_project("stable-scale", "elsewhere/two, größer")
    for path in two.rglob("*"):
        os.utime(path, (1, 1))
    planned = graph([one, two], CPU, "torch213-cxx11-cpu-x86_64-linux", "torch215-cxx11-cpu-x86_64-linux")
    assert len(planned.variants) == 6
    assert len(planned.binaries) == 1
    assert len(planned.compiles) == 2
    assert len(planned.variants_of(planned.compiles[0])) == 6


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        (BINDING, {BINDING}),
        (SOURCE, {SOURCE}),
        (HEADER, {BINDING, SOURCE}),
        (PYTHON, set()),
    ],
)
def test_a_change_renames_its_steps_and_the_binary(copy_project: Copy, file: str, changed: set[str]) -> None:
    directory = copy_project("stable-scale")
    before = binary(directory)
    with (directory / file).open("a") as stream:
        stream.write("\n")
    after = binary(directory)
    assert {source for source in (BINDING, SOURCE) if keys(before)[source] != keys(after)[source]} == changed
    assert before.module != after.module
    assert before.key != after.key


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("version = 1", "version = 2"),
        ('"stable-scale"', '"table-scale"'),
        ('backend = "cpu"', 'backend = "cpu"\ncxx-flags = ["-O2"]'),
        ('stable-abi = "2.10"', 'stable-abi = "2.11"'),
    ],
)
def test_build_toml_names_the_binary(copy_project: Copy, old: str, new: str) -> None:
    directory = copy_project("stable-scale")
    before = binary(directory)
    shutil.copytree(directory / "torch-ext" / "stable_scale", directory / "torch-ext" / "table_scale")
    file = directory / "build.toml"
    file.write_text(file.read_text().replace(old, new, 1))
    (after,) = graph([directory], CPU.replace("210", "211") if "2.11" in new else CPU).binaries
    assert before.module != after.module


def test_what_no_step_reads_names_nothing(copy_project: Copy) -> None:
    directory = copy_project("stable-scale")
    before = binary(directory)
    (directory / "scale" / "other.h").write_text("int other;")
    (directory / "README.md").write_text("words")
    source = directory / "scale" / "scale_cuda.cu"
    source.write_text(source.read_text() + "\n")
    assert binary(directory) == before


def test_the_name_of_a_binary(copy_project: Copy) -> None:
    found = binary(copy_project("stable-scale"))
    assert re.fullmatch(r"_stable_scale_cpu_[a-z2-7]{13}", found.module)
    assert len(found.module.rpartition("_")[2]) == len(PLACEHOLDER)
    binding, source = found.objects
    assert (binding.placeholder, source.placeholder) == (True, False)
    assert f"-DTORCH_EXTENSION_NAME=_stable_scale_cpu_{PLACEHOLDER}" in binding.argv


def test_a_step_that_took_the_placeholder_apart_is_told_the_name(copy_project: Copy) -> None:
    directory = copy_project("stable-scale")
    before = binary(directory)
    (after,) = graph([directory], is_split=lambda key: key == keys(before)[BINDING]).binaries
    assert after.module == before.module
    assert after.key != before.key
    assert keys(after)[SOURCE] == keys(before)[SOURCE]
    assert not after.objects[0].placeholder
    assert f"-DTORCH_EXTENSION_NAME={after.module}" in after.objects[0].argv


def test_commands_name_no_place_of_this_machine_but_programs(copy_project: Copy) -> None:
    directory = copy_project("stable-scale")
    for step in binary(directory).objects:
        assert not any(str(directory) in part or str(Toolchains().store.root) in part for part in step.argv)
