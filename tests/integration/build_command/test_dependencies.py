"""Header libraries, CUDA's libraries and other kernels that kernels depend on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder import elf
from kernel_format.errors import ConfigError, ToolchainError, VariantError
from tests.integration.build_command.conftest import FOR_CPU, Copy, Run
from tests.support.files import append, replace, write_files
from tests.support.places import CPU, CUDA, SOURCES
from tests.support.python_project import write_project

# The files of CUTLASS that the code below uses.
HEADERS = {
    "include/cutlass/cutlass.h": "#pragma once\n",
    "include/cutlass/version.h": "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 5\n#define CUTLASS_PATCH 2\n",
    "include/cutlass/gemm_coord.h": "#pragma once\nstruct Coord { int m; };\n",
    "tools/util/include/cutlass/util/packed_stride.hpp": "#pragma once\n",
}


def depend(project: Path, name: str, *includes: str, backend: str = "cuda") -> Path:
    """Make the kernel of stable-scale for a backend depend on a library and include headers of it."""
    declared = f'language = "cpp-{backend}"\ndepends = '
    replace(project / "build.toml", f"{declared}[]", f'{declared}["{name}"]')
    lines = "".join(f"#include <{header}>\n" for header in includes)
    source = {"cuda": "scale_cuda.cu", "cpu": "scale_cpu.cpp"}[backend]
    replace(project / "scale" / source, "#include", f"{lines}#include")
    return project


@pytest.fixture
def cutlass(tmp_path: Path) -> Path:
    """Return a directory like a checkout of CUTLASS 4.5.2."""
    return write_files(tmp_path / "cutlass", HEADERS)


def test_a_pinned_library_and_a_library_of_cuda(copy_project: Copy, shared_cache: Path, kernel_builder: Run) -> None:
    """Symbols of cuBLAS stay undefined: Torch's CUDA part loads it. All sources of the backend see the library."""
    project = depend(copy_project("stable-scale"), "cutlass_3_8", "cutlass/cutlass.h", "cutlass/util/command_line.h")
    with (project / "scale" / "scale_cuda.cu").open("a") as source:
        source.write("#include <cutlass/version.h>\nstatic_assert(CUTLASS_MAJOR == 3 && CUTLASS_MINOR == 8);\n")
        source.write("#include <cublas_v2.h>\nint blas(cublasHandle_t* handle) { return cublasCreate(handle); }\n")
        source.write('extern "C" int cuMemAlloc_v2();\nint memory() { return cuMemAlloc_v2(); }\n')
    (project / "scale" / "other.cpp").write_text("#include <cutlass/version.h>\n")
    other = '[kernel.other]\nlanguage = "cpp-cuda"\ndepends = []\nsrc = ["scale/other.cpp"]\n'
    append(project / "build.toml", f'{other}cuda-capabilities = ["9.0"]\n')
    replace(project / "torch-ext" / "torch_binding.cpp", "#include", "#include <cutlass/version.h>\n#include")
    kernel_builder.build(project, "--variant", CUDA, "--no-load", cache=shared_cache)
    (binary,) = (elf.read(path) for path in (project / "build" / CUDA).rglob("*.so"))
    assert "cublasCreate_v2" in {symbol.name for symbol in binary.undefined}
    assert {"libtorch_cuda.so", "libcuda.so.1"} <= set(binary.needed), "the driver is named, since it is called"
    assert not any("cublas" in library for library in binary.needed)


def test_a_library_that_no_index_has_is_refused_before_anything_is_compiled(
    copy_project: Copy, tmp_path: Path, kernel_builder: Run
) -> None:
    project, cache = depend(copy_project("stable-scale"), "cutlass_4_5"), tmp_path / "cold"
    hint = "KERNEL_BUILDER_DEPENDENCIES=cutlass_4_5=DIR; or depend on one that the index has: cutlass_3_5, "
    for option, where in ((("--variant", CUDA), CUDA), (("--backend", "cuda"), project)):
        expected = (VariantError, where, "needs cutlass_4_5, which no package index", hint)
        kernel_builder.refuse(project, *option, cache=cache, expected=expected)
    assert not cache.exists()
    rows = {row["variant"]: row for row in kernel_builder(cache, "list-variants", project).answer}
    assert not rows[CUDA]["buildable"]
    assert "needs cutlass_4_5" in rows[CUDA]["reason"] and hint in rows[CUDA]["hint"]
    assert rows[CPU]["buildable"]


def test_a_directory_with_the_library(copy_project: Copy, cutlass: Path, kernel_builder: Run) -> None:
    """The content of the directory's headers, and not its place, determines the sources that are compiled again."""
    headers = ("cutlass/gemm_coord.h", "cutlass/util/packed_stride.hpp")
    project = depend(copy_project("stable-scale"), "cutlass_4_5", *headers, backend="cpu")

    def compiles(directory: Path) -> object:
        given = {"KERNEL_BUILDER_DEPENDENCIES": f"cutlass_4_5={directory}"}
        return kernel_builder.build(project, *FOR_CPU, **given)["compiles"]

    assert compiles(cutlass) == 2
    moved = cutlass.rename(cutlass.with_name("moved"))
    assert compiles(moved) == 0
    replace(moved / "include/cutlass/gemm_coord.h", "int m;", "int m, n;")
    assert compiles(moved) == 2, "the kernel, and the binding with its new op namespace"


def test_a_directory_of_another_version_is_refused(copy_project: Copy, cutlass: Path, kernel_builder: Run) -> None:
    project = depend(copy_project("stable-scale"), "cutlass_4_4")
    for given, message in {
        f"cutlass_4_4={cutlass}": "is CUTLASS 4.5.2, expected 4.4",
        f"cutlass_4_4={cutlass}/include": "has no include/cutlass/cutlass.h",
        "cutlass_4_4": "is not NAME=DIR",
        f"cutlass_9_9={cutlass}": "is not NAME=DIR with one of the names cutlass_2_10",
    }.items():
        expected, variables = (ToolchainError, "", message, ""), {"KERNEL_BUILDER_DEPENDENCIES": given}
        kernel_builder.refuse(project, "--variant", CUDA, expected=expected, **variables)


def test_a_kernel_that_depends_on_compiled_ones(copy_project: Copy, shared_cache: Path, tmp_path: Path) -> None:
    """The ops of a dependency are not the project's. It may be a project of the command, or in LOCAL_KERNELS."""
    versions, kernel_builder = [], Run(shared_cache)
    for version in (1, 2):
        versions.append(copy_project("stable-scale", f"scale-v{version}"))
        replace(versions[-1] / "build.toml", "version = 1", f"version = {version}")
    top = write_project(tmp_path / "top", SOURCES["kernel_with_a_dependency"], "stable-scale")

    (package,) = kernel_builder.build(top, HF_HUB_CACHE=str(tmp_path / "empty"))["packages"]
    reason = package["skipped-checks"]["load"]
    assert "which cannot be loaded here: build its project in the same command" in reason

    together = kernel_builder.build(top, *versions, "--backend", "cpu")["packages"]
    assert [(built["project"], "load" in built["passed-checks"]) for built in together] == [
        ("stable-scale (scale-v1)", True),
        ("stable-scale (scale-v2)", True),
        ("top", True),
    ]
    assert "ops" in together[2]["passed-checks"]

    (top / "torch-ext" / "top" / "more.py").write_text("")
    (local,) = kernel_builder.build(top, "--sandbox", "off", LOCAL_KERNELS=f"org/stable-scale={versions[0] / 'build'}")[
        "packages"
    ]
    assert local["variant"] == "torch-cpu" and "load" in local["passed-checks"]


def test_kernels_that_depend_on_each_other(kernel_builder: Run, tmp_path: Path) -> None:
    one, two = (write_project(tmp_path / name, "", other) for name, other in (("one", "two"), ("two", "one")))
    expected = (ConfigError, "kernel-depends", "the kernels depend on each other: ", "remove one")
    kernel_builder.refuse(one, two, "--no-load", expected=expected)
