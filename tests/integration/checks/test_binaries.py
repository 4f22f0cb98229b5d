"""Checks of real shared objects: a valid one, and one for each fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder import toml_file
from kernel_builder.checks import ProbeProcess, run_all
from kernel_builder.config.variant import this_platform
from tests.support.places import SOURCES
from tests.support.sample_package import STABLE_CPU, STABLE_CUDA, Compile, Make, findings, identity


def calling(declaration: str, call: str) -> str:
    """Return C++ that declares a symbol and refers to it."""
    return f'{declaration}\n__attribute__((visibility("default"))) void caller() {{ {call}; }}\n'


def calling_c(function: str) -> str:
    return calling(f'extern "C" void {function}();', f"{function}()")


SLEEF = '\nextern "C" void Sleef_expf8_u10(); auto* sleef = &Sleef_expf8_u10;\n'
SCALAR_OF_TORCH = calling("namespace c10 { struct Scalar { Scalar(int); void* p; }; }", "c10::Scalar s(1)")


def test_valid_packages_have_no_findings(compile_module: Compile, make: Make, probe: ProbeProcess) -> None:
    openmp = calling(
        'extern "C" { void GOMP_parallel(); int omp_in_parallel(); }', "GOMP_parallel(); omp_in_parallel()"
    )
    flags = ("-Wl,--no-as-needed", "-l:libtorch_cuda.so")
    packages = [
        make(STABLE_CPU, compile_module(STABLE_CPU)),
        make(f"torch213-cxx11-cpu-{this_platform()}", compile_module(STABLE_CPU, openmp + SLEEF)),
        make(STABLE_CUDA, compile_module(STABLE_CUDA, calling_c("cudaDeviceSynchronize"), *flags)),
        make("torch-cpu"),
    ]
    assert [findings(package, probe=probe) for package in packages] == [[], [], [], []]


CUDA_LIBRARIES = (
    *("cublasCreate_v2", "cublasLtCreate", "cudnnCreate", "cufftPlan1d", "cuFileDriverOpen", "curandCreateGenerator"),
    *("cusolverDnCreate", "cusparseCreate", "cusparseLtInit", "cuMemAlloc_v2", "ncclAllReduce", "nvrtcCompileProgram"),
)


@pytest.mark.parametrize(
    ("variant", "missing"),
    [
        ("torch214-cxx11-cu130", {"cuSOLVER", "the CUDA driver"}),
        ("torch215-cxx11-cu130", {"cuSOLVER", "the CUDA driver", "cuRAND"}),
        ("torch210-cxx11-cu128", {"cuSOLVER", "the CUDA driver", "NVRTC"}),
        ("torch-stable-abi210-cu130", {"cuSOLVER", "the CUDA driver", "NVRTC", "cuRAND"}),
    ],
)
def test_cuda_libraries_are_those_that_torch_loads(
    compile_module: Compile, make: Make, variant: str, missing: set[str]
) -> None:
    """A kernel may leave their symbols undefined. Others have to come from a library that the binary names."""
    declarations = "".join(f"void {name}();" for name in CUDA_LIBRARIES)
    extra = calling(f'extern "C" {{ {declarations} }}', "();".join(CUDA_LIBRARIES) + "()")
    module = compile_module(STABLE_CUDA, extra, "-Wl,--no-as-needed", "-l:libtorch_cuda.so")
    reported = findings(make(f"{variant}-{this_platform()}", module), "undefined")
    assert {finding.message.partition(" is a symbol of ")[2].partition(", and ")[0] for finding in reported} == missing
    assert all("dlopen when it is called" in finding.hint for finding in reported)


# C functions that the faulty binary calls. `abort` is the last: the compiler removes what follows.
CALLED = (
    *("arc4random", "_PyObject_GetState", "PyObject_GetBuffer", "torch_from_blob", "cudaDeviceSynchronize"),
    *("torch_cuda_stream_synchronize", "abort"),
)
FAULTY = SOURCES["faulty_binary"].format(
    declared="".join(f"void {name}();" for name in CALLED), called="".join(f"{name}();" for name in CALLED)
)
FLAGS = ("-Wl,--no-as-needed", "-l:libforeign.so.3", "-l:libtorch_cuda.so", "-Wl,-rpath,/opt/lib", "-DNO_MODULE")
FAULTS = toml_file.read(Path(__file__).with_name("faults.toml"))


def test_each_fault_of_a_binary_has_one_finding(compile_module: Compile, make: Make, probe: ProbeProcess) -> None:
    module = compile_module(STABLE_CPU, FAULTY, *FLAGS, "-Wl,-z,execstack", "-Wl,-z,notext")
    reported = findings(make(STABLE_CPU, module), probe=probe)
    for message, check in FAULTS.items():
        assert [finding.check for finding in reported if message in finding.message] == [check], message
    assert len(reported) == len(FAULTS), reported
    assert {finding.path for finding in reported} == {f"{identity(STABLE_CPU)}.abi3.so"}
    assert all(finding.hint for finding in reported)


def test_a_binary_that_is_not_linked_with_torch_is_reported(
    compile_module: Compile, make: Make, probe: ProbeProcess
) -> None:
    reported = findings(make(STABLE_CPU, compile_module(STABLE_CPU, torch_library="-lc")), probe=probe)
    assert {finding.check for finding in reported} == {"undefined"}
    assert "torch_library_impl is a symbol of Torch, and no library that the binary needs defines it" in [
        finding.message for finding in reported
    ]


def test_openmp_comes_from_torch(compile_module: Compile, make: Make, probe: ProbeProcess) -> None:
    """Other OpenMP runtimes, and OpenMP without Torch, are reported."""
    module = compile_module(STABLE_CPU, calling_c("GOMP_parallel"), torch_library="-lc")
    hints = {finding.message: finding.hint for finding in findings(make(STABLE_CPU, module), "undefined")}
    message = "GOMP_parallel is a symbol of the OpenMP runtime, and no library that the binary needs defines it"
    assert "libtorch_cpu.so" in hints[message]
    module = compile_module(STABLE_CPU, "", "-Wl,--no-as-needed", "-l:libgomp-a34b3233.so.1")
    (finding,) = findings(make(STABLE_CPU, module), probe=probe)
    assert finding.check == "dependencies"
    assert "leave the symbols of OpenMP undefined" in finding.hint


def test_an_unversioned_symbol_of_the_cpp_runtime_is_a_warning(compile_module: Compile, make: Make) -> None:
    extra = calling("namespace std { void not_versioned(); }", "std::not_versioned()")
    report = next(run_all([make(STABLE_CPU, compile_module(STABLE_CPU, extra))], only=["undefined"]))
    assert [(finding.severity, finding.message.split(",")[0]) for finding in report.findings] == [
        ("warning", "std::not_versioned() is a symbol of the C++ runtime")
    ]
    assert report.ok


CUDA12, ROCM = (STABLE_CUDA.replace("cu130", release) for release in ("cu126", "rocm71"))


@pytest.mark.parametrize(
    ("variant", "function", "library", "message"),
    [
        (STABLE_CUDA, "cudaMalloc", "libcudart.so.12", "libcudart.so.12, which Torch for CUDA 13 does not depend"),
        # The headers of CUDA 12.8 declare it, but a Torch for CUDA 12.6 would not load the binary.
        (CUDA12, "cudaEventElapsedTime_v2", "libtorch_cuda.so", "is not in the runtime of CUDA 12.6"),
        (ROCM, "hipLaunchKernel", "libtorch_hip.so", None),
        (ROCM, "aoti_torch_get_current_cuda_stream", "libtorch_hip.so", None),
        (ROCM, "hipLaunchKernel", "libtorch_cpu.so", "no library that the binary needs defines it"),
        (ROCM, "hipNoSuchFunction", "libtorch_hip.so", "is undefined"),
        (ROCM, "cudaMalloc", "libtorch_hip.so", "which a rocm variant does not have"),
    ],
)
def test_symbols_and_libraries_are_those_of_the_variants_runtime_and_torch(
    compile_module: Compile, make: Make, variant: str, function: str, library: str, message: str | None
) -> None:
    module = compile_module(variant, calling_c(function), "-Wl,--no-as-needed", f"-l:{library}")
    messages = [finding.message for finding in findings(make(variant, module), "undefined", "dependencies")]
    assert len(messages) == (message is not None), messages
    assert all(str(message) in text for text in messages), messages


def test_the_full_abi_may_use_the_cpp_of_torch(compile_module: Compile, make: Make, probe: ProbeProcess) -> None:
    variant = f"torch213-cxx11-cpu-{this_platform()}"
    package = make(variant, compile_module(variant, SCALAR_OF_TORCH))
    assert findings(package, probe=probe) == []
    report = next(run_all([package], only=["torch-stable-abi"]))
    assert report.skipped == {"torch-stable-abi": "the variant does not claim the stable ABI"}


def test_a_file_that_is_not_a_binary(make: Make, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x7fELF" + bytes(100))
    others = {"manylinux", "python-abi", "torch-stable-abi", "undefined", "dependencies", "run-path"}
    report = next(run_all([make(STABLE_CPU, garbage)], only=["binary", *others]))
    assert [finding.check for finding in report.findings] == ["binary"]
    assert "cannot be read as an ELF file" in report.findings[0].message
    assert set(report.skipped) == others


def test_a_binary_for_another_platform_is_reported(compile_module: Compile, make: Make, probe: ProbeProcess) -> None:
    other = "aarch64-linux" if this_platform() == "x86_64-linux" else "x86_64-linux"
    variant = f"torch-stable-abi210-cpu-{other}"
    (finding,) = findings(make(variant, compile_module(variant)), probe=probe)
    assert (finding.check, f"in a variant for {other}" in finding.message) == ("binary", True)
