"""Command line of the linker, and the libraries of Torch that a binary names."""

from __future__ import annotations

from kernel_builder.backends import CompiledBackend
from kernel_builder.build.graph import SYSROOT

# Raise when a change to the builder changes the bytes that a step gives for an equal command.
RECIPE = 1

EXPORTS = "{ global: PyInit_*; local: *; };\n"

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


def torch_libraries(backend: CompiledBackend, *, stable: bool) -> tuple[str, ...]:
    """Return the libraries of Torch that a binary names as needed."""
    host = ("libtorch_cpu.so",) if stable else ("libc10.so", "libtorch_cpu.so", "libtorch.so")
    return (*host, *backend.torch_libraries(stable=stable))
