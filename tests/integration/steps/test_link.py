"""The link step, with one object that is made by hand."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_builder import elf
from kernel_builder.backends.cpu import CPU
from kernel_builder.backends.cuda import CUDA
from kernel_builder.config.variant import Release, StableAbi, this_platform
from kernel_builder.steps.plan import framework_libraries
from kernel_builder.steps.step_scripts import stage_link
from tests.unit.steps.test_plan import Copy, binary

Link = Callable[..., elf.SharedObject]


@pytest.fixture
def link(copy_project: Copy, tmp_path: Path) -> Link:
    """Return a function that links a source in C++ as a binary for CUDA or for the CPU."""

    def make(source: str, *, cuda: bool) -> elf.SharedObject:
        planned = binary(copy_project("stable-scale"))
        backend = CUDA if cuda else CPU
        libraries = framework_libraries(StableAbi(Release(2, 10)), backend, stable=True)
        changed = replace(planned, objects=planned.objects[:1], libraries=libraries)
        changed = replace(changed, linked_if_called=backend.linked_if_called)
        output = tmp_path / "object.o"
        compiler = ["g++", "-c", "-fPIC", "-O2", "-x", "c++", "-", "-o", str(output)]
        subprocess.run(compiler, input=source, text=True, check=True)
        stage_link(changed, tmp_path / "link", [output])
        subprocess.run(["sh", str(tmp_path / "link" / "run.sh")], check=True)
        return elf.read(tmp_path / "link" / "out.so")

    return make


@pytest.mark.parametrize(
    ("function", "needed"),
    [
        ("cuMemAlloc_v2", {"libtorch_cpu.so", "libtorch_cuda.so", "libcuda.so.1"}),
        ("cuFileOpen", {"libtorch_cpu.so", "libtorch_cuda.so"}),
    ],
)
def test_a_binary_names_the_cuda_driver_if_it_calls_it(link: Link, function: str, needed: set[str]) -> None:
    linked = link(f'extern "C" int {function}(); extern "C" int PyInit_x() {{ return {function}(); }}', cuda=True)
    assert set(linked.needed) == needed
    assert (function, None) in {(symbol.name, symbol.version) for symbol in linked.undefined}


def test_thread_local_variables_come_from_the_dynamic_linker(link: Link) -> None:
    linked = link('thread_local int number; extern "C" int PyInit_x() { return ++number; }', cuda=False)
    assert [symbol.name for symbol in linked.undefined if not symbol.weak and symbol.version is None] == []


@pytest.mark.skipif(this_platform() != "x86_64-linux", reason="the older version of powf is that of x86_64")
def test_a_source_can_name_the_older_version_of_a_symbol(link: Link) -> None:
    source = """__asm__(".symver powf,powf@GLIBC_2.2.5");
        extern "C" float powf(float, float);
        extern "C" float expf(float);
        extern "C" float PyInit_x(float x) { return powf(x, expf(x)); }"""
    linked = {symbol.name: symbol.version for symbol in link(source, cuda=False).undefined}
    assert (linked["powf"], linked["expf"]) == ("GLIBC_2.2.5", "GLIBC_2.27")


def test_shared_state_of_the_cpp_library_is_not_duplicated(link: Link) -> None:
    """Streams and facets are newer in part; the standard streams, the locale and its facets stay in libstdc++.so.6."""
    linked = link(
        """
        #include <filesystem>
        #include <iostream>
        #include <sstream>
        extern "C" const void* PyInit_x() {
          std::stringstream stream;
          stream << std::filesystem::path("a").filename().string();
          std::cout << stream.str();
          return stream.getloc() == std::locale() ? &std::ctype<char>::id : nullptr;
        }
        """,
        cuda=False,
    )
    versions = {symbol.name: symbol.version for symbol in linked.undefined if not symbol.weak}
    assert versions["_ZSt4cout"] == "GLIBCXX_3.4"
    assert versions["_ZNSt5ctypeIcE2idE"] == "GLIBCXX_3.4"
    assert versions["_ZNSt6localeD1Ev"] == "GLIBCXX_3.4"
    assert [name for name, version in versions.items() if version is None] == []
