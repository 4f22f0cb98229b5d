"""Back ends: one file for each, with all that is true of it alone, and the protocol that they share.

A back end is a value, which later stages ask for by the name in a variant:

    backends.compiled(variant.backend).torch_libraries(stable=True)

`config.known_backends` finds it; a package of its own can register more.
"""

from kernel_builder.backends.compiled import (
    CompiledBackend,
    DeviceCommand,
    DeviceFinding,
    DeviceSource,
    LinkedIfCalled,
    SymbolFamily,
    Toolkit,
    compiled,
    every,
)
from kernel_builder.backends.host_code import CompileOptions, Compiler, gxx, token

__all__ = [
    "CompileOptions",
    "CompiledBackend",
    "Compiler",
    "DeviceCommand",
    "DeviceFinding",
    "DeviceSource",
    "LinkedIfCalled",
    "SymbolFamily",
    "Toolkit",
    "compiled",
    "every",
    "gxx",
    "token",
]
