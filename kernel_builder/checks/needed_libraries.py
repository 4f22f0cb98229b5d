"""Check that a binary needs only libraries that its users have: its framework's, its device's and the C++ runtime."""

from __future__ import annotations

from collections.abc import Iterator

from kernel_builder.checks.findings import CheckedPackage, Finding

NAME = "dependencies"

_RUNTIME = frozenset(
    f"lib{name}"
    for name in ("c.so.6", "m.so.6", "mvec.so.1", "dl.so.2", "pthread.so.0", "rt.so.1", "stdc++.so.6", "gcc_s.so.1")
) | {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
# The wheels of Torch have libgomp.so.1; a process that has loaded it does not load another library of that name.
_TORCH = frozenset({"libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so", "libgomp.so.1"})

_TVM_FFI = frozenset({"libtvm_ffi.so"})


def check_dependencies(package: CheckedPackage) -> Iterator[Finding]:
    allowed = _allowed(package)
    for binary in package.binaries:
        for library in binary.needed:
            if library not in allowed:
                yield Finding(
                    NAME, binary.name, f"needs {library}, {_reason(package, library)}", _hint(package, library)
                )


def _allowed(package: CheckedPackage) -> frozenset[str]:
    release = package.variant.release if package.variant else None
    framework = _TVM_FFI if package.is_on_tvm_ffi else _TORCH
    return _RUNTIME.union(framework, *(backend.needed_libraries(release) for backend in package.backends))


def _reason(package: CheckedPackage, library: str) -> str:
    variant = package.variant
    for backend in package.known_backends:
        if variant and backend.looks_like and backend.looks_like.match(library):
            if variant.release and backend.name == variant.backend:
                return f"which Torch for {backend.title} {variant.release.major} does not depend on"
            return f"which a {variant.backend} variant does not have"
    return f"which neither {'TVM FFI' if package.is_on_tvm_ffi else 'Torch'} nor the C++ runtime provides"


def _hint(package: CheckedPackage, library: str) -> str:
    if library.startswith(("libgomp", "libiomp", "libomp")):
        return "leave the symbols of OpenMP undefined: they resolve to Torch's libgomp.so.1 through libtorch_cpu.so"
    if hint := next(filter(None, (backend.library_hint(library) for backend in package.known_backends)), None):
        return hint
    stem = library.partition(".so")[0].removeprefix("lib")
    return f"drop -l{stem}, and compile the parts that you need through `src`"
