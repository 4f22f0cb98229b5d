"""Projects with `[tvm-ffi]`, whose binaries link TVM FFI and no Torch.

A failure means that such a project is not built, or that the client does not load its package.
"""

from __future__ import annotations

from pathlib import Path

from kernel_builder import elf
from tests.integration.build_command.conftest import Copy, NewCache, Run, replace, run_python

CPU, CUDA = "tvm-ffi01-cpu-x86_64-linux", "tvm-ffi01-cu130-x86_64-linux"

# Two versions in one process; tensors of Torch and of NumPy, and one of a type that the kernel refuses.
LOAD = """
import sys, numpy, torch
from pathlib import Path
from kernels import get_local_kernel
for directory in sys.argv[1:]:
    kernel = get_local_kernel(Path(directory), backend="cpu")
    x = torch.arange(3.0)
    assert torch.equal(kernel.scaled(x, 2.0, torch.empty_like(x)), 2 * x)
    y = numpy.ones(2, numpy.float32)
    assert kernel.scaled(y, 3.0, numpy.empty_like(y)).tolist() == [3.0, 3.0]
    try:
        kernel.scaled(x.double(), 2.0, x)
    except TypeError as error:
        print(str(error).rpartition(": ")[2])
"""


def test_two_versions_load_in_one_process(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    projects = [copy_project("tvm-scale", f"scale-v{version}") for version in (1, 2)]
    replace(projects[1] / "build.toml", "version = 1", "version = 2")
    done = kernel_builder(cache, "build", *projects, "--backend", "cpu")
    assert done.code == 0, done.answer
    assert [built["variant"] for built in done.answer["packages"]] == [CPU, CPU]
    assert all("load" in built["passed-checks"] for built in done.answer["packages"]), done.answer
    assert not done.answer["warnings"], done.answer
    wheel = kernel_builder(cache, "wheel", projects[0])
    assert wheel.code == 2 and "by the installed Torch" in wheel.answer["message"], wheel.answer
    packages = [str(project / "build" / CPU) for project in projects]
    assert run_python(LOAD, *packages).splitlines() == 2 * ["expected float32"]


def test_a_binary_for_cuda_has_the_runtime_itself(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    """Nothing else brings it: tensors may be of another framework than Torch."""
    project = copy_project("tvm-scale")
    done = kernel_builder(cache, "build", project, "--backend", "cuda", "--no-load")
    assert done.code == 0, done.answer
    (package,) = done.answer["packages"]
    assert package["variant"] == CUDA and package["checks"]["findings"] == [], package
    (path,) = (project / "build" / CUDA).glob("*.so")
    binary = elf.read(path)
    assert "libtvm_ffi.so" in binary.needed and not [name for name in binary.needed if "cuda" in name]
    assert binary.exported == {"__tvm_ffi_scaled"}
    (elsewhere,) = (left for left in done.answer["unavailable"] if left["variant"] == CUDA.replace("130", "126"))
    assert "needs the static runtime of CUDA 12.6" in elsewhere["reason"] and "--cuda-home" in elsewhere["hint"]


def test_a_library_without_functions_is_refused(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    project = copy_project("tvm-scale")
    (project / "tvm-ffi-ext" / "binding.cpp").write_text("int nothing() { return 0; }\n")
    (project / "scale" / "scale_cpu.cpp").write_text("")
    done = kernel_builder(new_cache("cache"), "build", project, "--backend", "cpu", "--no-load")
    assert done.code != 0
    (finding,) = done.answer["failures"][0]["checks"]["findings"]
    assert finding["check"] == "python-abi" and finding["message"] == "exports no function of TVM FFI"
    assert "TVM_FFI_DLL_EXPORT_TYPED_FUNC" in finding["hint"]
