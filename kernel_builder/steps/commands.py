"""Command line of the linker, and the libraries of Torch or TVM FFI that a binary names."""

from __future__ import annotations

from kernel_builder.backends import CompiledBackend
from kernel_builder.config.variant import Abi, TvmFfiAbi
from kernel_builder.steps.graph import SYSROOT

# Increment when a change to the builder changes the output of an equal command.
RECIPE = 1

# Exported symbols: the initializer of a Python module, or the functions that TVM FFI looks up.
_EXPORTS = "{{ global: {}; local: *; }};\n"

TVM_FFI_LIBRARY = "libtvm_ffi.so"

LINK_FLAGS = (
    "-shared",
    "-nodefaultlibs",
    "-Wl,--build-id=none",
    "-Wl,--strip-all",
    "-Wl,--gc-sections",
    "-Wl,-z,noexecstack,-z,relro,-z,now",
    "-Wl,--version-script=exports.map",
    f"-L{SYSROOT}/lib",
)


def tvm_ffi_headers(framework: TvmFfiAbi) -> str:
    """Return the component with the headers of a release of TVM FFI."""
    return f"tvm-ffi-{framework.release}"


def exports(framework: Abi) -> str:
    """Return the linker's version script of a binary."""
    return _EXPORTS.format("__tvm_ffi_*" if isinstance(framework, TvmFfiAbi) else "PyInit_*")


def framework_libraries(framework: Abi, backend: CompiledBackend, *, stable: bool) -> tuple[str, ...]:
    """Return the libraries of Torch or TVM FFI that a binary needs."""
    if isinstance(framework, TvmFfiAbi):
        return (TVM_FFI_LIBRARY,)
    host = ("libtorch_cpu.so",) if stable else ("libc10.so", "libtorch_cpu.so", "libtorch.so")
    return (*host, *backend.torch_libraries(stable=stable))
