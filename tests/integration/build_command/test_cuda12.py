"""Variants of CUDA 12: clang compiles them, and their binaries work with the runtimes of CUDA 12 and 13."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernel_builder import elf
from kernel_builder.backends.cuda import runtime_exports
from kernel_format.errors import BuildError
from kernel_format.release import Release
from tests.integration.build_command.conftest import Copy, Run
from tests.support.files import append, replace
from tests.support.places import CUDA

CUDA12 = CUDA.replace("cu130", "cu126")
# Flags of nvcc that clang spells in another way, or does not need.
FLAGS = [
    *("--expt-relaxed-constexpr", "--threads=4", "-t", "4", "-diag-suppress=174", "-lineinfo", "--maxrregcount=64"),
    *("--fmad=false", "--use_fast_math", "-Xptxas=-v,-O3", "-Xptxas", "-dlcm=ca", "-Xcompiler=-fno-strict-aliasing"),
    *("-Xcudafe=--diag_warning=1", "-UNDEBUG", "-D", "A=1"),
]


def binary_of(package: Path) -> Path:
    (binary,) = package.glob("*.so")
    return binary


def test_one_binary_serves_cuda_12_and_13(copy_project: Copy, shared_cache: Path, kernel_builder: Run) -> None:
    """With clang for both, the variants share a binary, which uses functions that the runtime of every release has.

    The source calls functions that nvcc declares for the host, and clang for the device alone.
    """
    project = copy_project("stable-scale")
    code = "int blocks(long n, int at_least, float a) { return max(at_least, int(min(n, 9L) + max(a, 1.5))); }\n"
    append(project / "scale" / "scale_cuda.cu", code)
    flags = f"cuda-flags = {json.dumps(FLAGS)}"
    replace(project / "build.toml", 'capabilities = ["9.0"]', f'capabilities = ["9.0+PTX", "10.0", "12.1"]\n{flags}')
    options = ("--variant", CUDA12, "--variant", CUDA, "--cuda-compiler", "clang", "--no-load")
    kernel_builder.build(project, *options, cache=shared_cache)
    packages = [project / "build" / name for name in (CUDA12, CUDA)]
    assert len({binary_of(package).read_bytes() for package in packages}) == 1
    for package in packages:
        metadata = json.loads((package / "metadata.json").read_text())
        # CUDA 12.6 does not know 10.0, and no release of CUDA 12 that clang compiles with knows 12.1.
        assert metadata["backend"]["archs"] == ["9.0+PTX", "10.0"]
        assert metadata["provenance"]["cuda-compiler"].startswith("clang 22.")
    names = {symbol.name for symbol in elf.read(binary_of(packages[0])).undefined if "cuda" in symbol.name.lower()}
    exports = runtime_exports()
    used = {name for name in names if name in exports[Release(12, 8)]}
    assert {"__cudaRegisterFatBinary", "cudaLaunchKernel"} <= used
    assert all(used <= functions for functions in exports.values())


@pytest.mark.parametrize(
    ("flag", "message", "hint"),
    [
        ("-DREFUSED", "not for clang", "#ifndef __clang__"),
        ("-fnone", "unknown argument: '-fnone'", "has no -fnone: remove it from `cuda-flags`"),
    ],
)
def test_a_source_or_a_flag_that_clang_rejects(
    copy_project: Copy, kernel_builder: Run, flag: str, message: str, hint: str
) -> None:
    project = copy_project("stable-scale")
    declared = 'cuda-capabilities = ["9.0"]\n'
    replace(project / "build.toml", declared, f'{declared}cuda-flags = ["{flag}"]\n')
    refused = "#if defined(__clang__) && defined(REFUSED)\n#error not for clang\n#endif\n"
    append(project / "scale" / "scale_cuda.cu", refused)
    done = kernel_builder.refuse(project, "--variant", CUDA12, expected=(BuildError, "scale_cuda.cu", message, hint))
    assert "BUG REPORT" not in done.stderr
