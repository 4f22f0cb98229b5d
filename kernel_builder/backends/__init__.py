"""Back ends: one file or directory for each, with everything specific to it, and the protocol that they share.

`Variant.backend` and `Project.backends` hold them as values; `config.known_backends` finds one by its name. Other
packages can register more.
"""

from kernel_builder.backends.compiled import (
    CLANG,
    CompiledBackend,
    DeviceCode,
    DeviceCommand,
    DeviceSource,
    LinkedIfCalled,
    ReadAt,
    SymbolFamily,
    compiled,
    every,
)
from kernel_builder.backends.host_code import CompileOptions, Compiler, gxx, token
from kernel_builder.backends.tools import (
    ComponentFiles,
    HeaderLibrary,
    HostCompiler,
    Obstacle,
    ToolchainSource,
    Toolkit,
)

__all__ = [
    "CLANG",
    "CompileOptions",
    "CompiledBackend",
    "Compiler",
    "ComponentFiles",
    "DeviceCode",
    "DeviceCommand",
    "DeviceSource",
    "HeaderLibrary",
    "HostCompiler",
    "LinkedIfCalled",
    "Obstacle",
    "ReadAt",
    "SymbolFamily",
    "ToolchainSource",
    "Toolkit",
    "compiled",
    "every",
    "gxx",
    "token",
]
