"""The compiler's own list of the files that it has read: a file that no key covers is an error, with its name."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.steps import files_read, ninja_run
from kernel_builder.steps.graph import Graph
from kernel_builder.steps.plan import plan
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import ConfigError
from tests.support.files import replace
from tests.support.places import CPU, CUDA

pytestmark = pytest.mark.attack

CUDA12 = CUDA.replace("cu130", "cu126")
SOURCE = {CPU: "scale/scale_cpu.cpp", CUDA: "scale/scale_cuda.cu", CUDA12: "scale/scale_cuda.cu"}


def planned(directory: Path, variant: str) -> Graph:
    """Return the graph of the kernel's source alone: the binding takes longer to compile."""
    (whole,) = plan([(read_project(directory), [Variant.parse(variant)])], Toolchains()).variants
    assert whole.binary
    objects = tuple(step for step in whole.binary.objects if step.source == SOURCE[variant])
    binary = dataclasses.replace(whole.binary, objects=objects)
    return Graph((dataclasses.replace(whole, binary=binary),))


def refusals(graph: Graph, cache: Path) -> list[str]:
    """Run a graph, and return why its steps failed."""
    outcome = ninja_run.run(graph, cache, jobs=2)
    return [str(error) for error in outcome.failures.values()]


@pytest.mark.parametrize(
    ("variant", "text"),
    [
        (CPU, '#define OTHER "{other}"\n#include OTHER\n'),
        (CPU, "#define OTHER <OTHER_NAME>\n#define OTHER_NAME {other}\n#include OTHER\n"),
        (CPU, '#define OTHER "../../src/{up}{other}"\n#include OTHER\n'),
        (CPU, '#define OTHER "../../log"\n#include OTHER\n'),
        (CPU, 'asm(".inc" "bin \\"{other}\\"");\n'),
        (CPU, 'asm(".inc" "lude \\"{other}\\"");\n'),
        (CUDA, '#define OTHER "{other}"\n#ifdef __CUDA_ARCH__\n#include OTHER\n#endif\n'),
        (CUDA, 'asm(".inc" "bin \\"{other}\\"");\n'),
        (CUDA12, '#define OTHER "{other}"\n#ifdef __CUDA_ARCH__\n#include OTHER\n#endif\n'),
        (CUDA12, 'asm(".inc" "bin \\"{other}\\"");\n'),
    ],
)
def test_a_file_that_no_key_covers_is_an_error(
    copy_project: Callable[..., Path], new_cache: Callable[[str], Path], tmp_path: Path, variant: str, text: str
) -> None:
    directory, cache = copy_project("stable-scale"), new_cache("cache")
    source, other = directory / SOURCE[variant], tmp_path / "a $other's #1.h"
    other.write_text("")
    source.write_text(text.format(other=other, up="../" * 12) + source.read_text())
    (refusal,) = refusals(planned(directory, variant), cache)
    assert f"{source}: reads " in refusal
    assert f"{'./log' if '../log' in text else other}, which neither the project" in refusal
    assert not list((cache / "objects").glob("*/*.o"))


def test_the_link_compiles_nothing(copy_project: Callable[..., Path], new_cache: Callable[[str], Path]) -> None:
    """Bytecode of g++ in sections of an object, which its source writes, becomes code with the linker's plugin only."""
    directory, cache = copy_project("stable-scale"), new_cache("cache")
    (other := directory / "other").write_text("a file of the machine")
    code = f'asm(".section .init_array\\n.incbin \\"{other}\\"");'
    command = ["g++", "-flto", "-fPIC", "-x", "c++", "-S", "-o", "-", "-"]
    _, assembly = subprocess.run(command, input=code.encode(), capture_output=True, check=True).stdout.split(b"\n", 1)
    source = directory / SOURCE[CPU]
    source.write_bytes(source.read_bytes() + b'asm(R"ASM(\n%b\n.text\n)ASM");\n' % assembly)
    assert not refusals(planned(directory, CPU), cache)
    binaries = [path.read_bytes() for path in cache.rglob("*.so")]
    assert binaries and not any(b"a file of the machine" in binary for binary in binaries)


def test_several_capabilities(copy_project: Callable[..., Path], new_cache: Callable[[str], Path]) -> None:
    """nvcc names its intermediate files otherwise then, and the assembler has these names."""
    directory, cache = copy_project("stable-scale"), new_cache("cache")
    replace(directory / "build.toml", '["9.0"]', '["8.0", "9.0", "12.0+PTX"]')
    assert refusals(planned(directory, CUDA), cache) == []


def test_a_header_of_another_package_is_an_error(
    copy_project: Callable[..., Path], new_cache: Callable[[str], Path]
) -> None:
    directory, cache = copy_project("stable-scale"), new_cache("cache")
    source = directory / SOURCE[CPU]
    (header, *_) = foreign_headers()
    source.write_text(f"#include <iostream>\n#include <{header}>\n{source.read_text()}")
    (refusal,) = refusals(planned(directory, CPU), cache)
    assert f"{source}: reads /usr/include/{header}" in refusal


def test_a_build_does_not_ask_for_headers_of_other_packages(copy_project: Callable[..., Path]) -> None:
    """Not even if the cache has an object from the time before the header."""
    directory = copy_project("stable-scale")
    header, *_ = foreign_headers()
    source = directory / SOURCE[CPU]
    before = source.read_text()
    (source.parent / "own.h").write_text("")
    for name in (header, f"/usr/include/../include/{header}", "no-such-header.h", "x" * 300, "vector", "own.h"):
        source.write_text(f'#define HAS(x) __has_include(x)\n#if HAS("{name}")\n#endif\n{before}')
        if header not in name:
            planned(directory, CPU)
            continue
        with pytest.raises(ConfigError, match=f"tests with __has_include for /usr/include/{header}, which neither"):
            planned(directory, CPU)
    name, _ = header.split(".")
    for text in (
        f"#define H_(x) <x.h>\n#if __has_include(H_({name}))",
        f"#define S_(x) #x\n#if __has_include_next (S_({header}))",
        "#define ASK(x) __has_include(x)\n#if defined(ASK) && ASK(NAME)",
        f"#define H_(x) <x.h>\n#define NAME H_({name})\n#if 0\n#define NAME <a.h>\n#elif __has_include(NAME)",
        f"#define ASK __has_include\n#if ASK(<{header}>)",
        f"#define C2(a, b) a##b\n#define C1(a, b) C2(a, b)\n#if C1(__ha, s_include)(<{header}>)",
        f"#if 0\n' /*\n#endif\n#if __has_include(<{header}>) // */",
    ):
        source.write_text(f"{text}\n#endif\n{before}")
        with pytest.raises(ConfigError, match=r"tests with __has_include for .*, which (no|neither)"):
            planned(directory, CPU)
    source.write_text(f'#if __has_embed("../../x.h")\n#endif\n{before}')
    with pytest.raises(ConfigError, match=r"tests with __has_include for ../../x.h, which neither"):
        planned(directory, CPU)


def foreign_headers() -> list[str]:
    """Return the names of headers of other packages on this machine."""
    names = [name for name in ("expat.h", "png.h", "FlexLexer.h", "zlib.h") if Path("/usr/include", name).is_file()]
    if not names:
        pytest.skip("this machine has none of these headers")
    return names


def test_headers_of_the_compiler_and_the_c_library_are_known() -> None:
    """All that the headers of the C++ library, of POSIX and of threads include, and nothing in /usr/local."""
    names = ("bits/stdc++.h", "unistd.h", "pthread.h", "sys/mman.h", "linux/futex.h", "netinet/in.h", "omp.h", "math.h")
    host = Toolchains().host()
    text = "".join(f"#include <{name}>\n" for name in names)
    command = [host.path, "-M", "-x", "c++", "-", "-fopenmp"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    files = done.stdout.replace("\\\n", " ").split()[1:]
    assert len(files) > 200

    assert files_read.foreign([file for file in files if file != "-"], host.headers) == []
    names = ("local/include/math.h", "include/png.h", "include/sys/capability.h", "include/a/math.h")
    others = [f"/usr/{name}" for name in names]
    assert files_read.foreign(others, host.headers) == others
