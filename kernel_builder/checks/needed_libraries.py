"""Check that a binary needs only libraries that its users have: Torch's, CUDA's and the C++ runtime."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kernel_builder.checks.findings import CheckedPackage, Finding

NAME = "dependencies"

_RUNTIME = frozenset(
    f"lib{name}"
    for name in ("c.so.6", "m.so.6", "mvec.so.1", "dl.so.2", "pthread.so.0", "rt.so.1", "stdc++.so.6", "gcc_s.so.1")
) | {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
# The wheels of Torch have libgomp.so.1; a process that has loaded it does not load another library of that name.
_TORCH = frozenset({"libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so", "libgomp.so.1"})
_TORCH_CUDA = frozenset({"libtorch_cuda.so", "libc10_cuda.so"})
# The CUDA libraries that Torch's packages depend on, by CUDA major version.
_CUDA = {
    12: frozenset(
        f"lib{name}"
        for name in (
            "cudart.so.12",
            "cublas.so.12",
            "cublasLt.so.12",
            "cufft.so.11",
            "cusolver.so.11",
            "cusparse.so.12",
            "nvJitLink.so.12",
            "nvrtc.so.12",
            "cupti.so.12",
            "nvToolsExt.so.1",
        )
    ),
    13: frozenset(
        f"lib{name}"
        for name in (
            "cudart.so.13",
            "cublas.so.13",
            "cublasLt.so.13",
            "cufft.so.12",
            "cusolver.so.12",
            "cusparse.so.12",
            "nvJitLink.so.13",
            "nvrtc.so.13",
            "cupti.so.13",
        )
    ),
}
_CUDA_ANY = frozenset(
    f"lib{name}"
    for name in (
        "cuda.so.1",
        "curand.so.10",
        "cudnn.so.9",
        "cusparseLt.so.0",
        "cufile.so.0",
        "nccl.so.2",
        "nvshmem_host.so.3",
    )
)
_LOOKS_LIKE_CUDA = re.compile(r"lib(?:cu[a-z]|nv[a-zA-Z]|nccl|torch_cuda|c10_cuda)")


def check_dependencies(package: CheckedPackage) -> Iterator[Finding]:
    allowed = _allowed(package)
    for binary in package.binaries:
        for library in binary.needed:
            if library not in allowed:
                yield Finding(NAME, binary.name, f"needs {library}, {_reason(package, library)}", _hint(library))


def _allowed(package: CheckedPackage) -> frozenset[str]:
    allowed = _RUNTIME | _TORCH
    if package.may_use_cuda:
        release = package.variant.cuda if package.variant else None
        majors = _CUDA.values() if release is None else [_CUDA.get(release.major, frozenset())]
        allowed = allowed | _TORCH_CUDA | _CUDA_ANY | frozenset().union(*majors)
    return allowed


def _reason(package: CheckedPackage, library: str) -> str:
    if package.variant and _LOOKS_LIKE_CUDA.match(library):
        if package.variant.cuda:
            return f"which Torch for CUDA {package.variant.cuda.major} does not depend on"
        return f"which a {package.variant.backend} variant does not have"
    return "which neither Torch nor the C++ runtime provides"


def _hint(library: str) -> str:
    if library.startswith(("libgomp", "libiomp", "libomp")):
        return "leave the symbols of OpenMP undefined: they resolve to Torch's libgomp.so.1 through libtorch_cpu.so"
    if library.startswith("libcudart"):
        return "leave the CUDA runtime's symbols undefined: they resolve through libtorch_cuda.so"
    stem = library.partition(".so")[0].removeprefix("lib")
    return f"drop -l{stem}, and compile the parts that you need through `src`"
