"""A back end for a device that does not exist. g++ compiles its sources, and no machine has its runtime library.

It has the name of one that the builder only recognises: the public client reads no package of a name that it does not
know.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from kernel_builder.backends import (
    CompiledBackend,
    CompileOptions,
    Compiler,
    DeviceCommand,
    DeviceSource,
    HostCompiler,
    LinkedIfCalled,
    SymbolFamily,
    ToolchainSource,
    Toolkit,
    gxx,
)
from kernel_builder.config import toml_schema
from kernel_builder.config.project import Kernel
from kernel_builder.config.toml_schema import Key
from kernel_builder.config.variant import FullAbi, Noarch, Release, StableAbi

TABLE = Path(__file__).with_name("toy.toml")
RUNTIME = "libtoy.so.1"


class _Toy(CompiledBackend):
    def toolkit(self, toolchains: ToolchainSource, release: Release | None) -> Toolkit:
        identity = hashlib.sha256(TABLE.read_bytes()).hexdigest()
        return Toolkit(name="toy", root=TABLE.parent, release=release, include=(), identity=identity)

    def archs(self, kernels: Sequence[Kernel], release: Release | None, platform: str) -> tuple[str, ...]:
        known = self.data["release"][str(release)]["archs"]
        return tuple(arch for arch in known if any(arch in kernel.settings["toy_archs"] for kernel in kernels))

    def device_command(
        self, source: DeviceSource, host: HostCompiler, toolkit: Toolkit | None, options: CompileOptions
    ) -> DeviceCommand:
        assert toolkit
        program, *arguments = gxx(host, toolkit, options)
        archs = self.archs([source.kernel], toolkit.release, source.platform)
        language = ("-x", "c++", "-include", "builder/toy.h")
        argv = (program, *language, *arguments, *(f"-DTOY_{arch.upper()}" for arch in archs))
        return DeviceCommand(argv, Compiler("toy g++"), {"builder/toy.h": 'extern "C" void toy_launch(long count);\n'})

    def needed_libraries(self, release: Release | None) -> frozenset[str]:
        return frozenset({RUNTIME})

    def symbol_families(self, framework: FullAbi | StableAbi | Noarch | None) -> Sequence[SymbolFamily]:
        names, libraries = re.compile("toy_"), re.compile("libtoy")
        return [SymbolFamily("the toy runtime", names, libraries, f"link with {RUNTIME}")]


TOY = _Toy(
    name="cann",
    title="Toy",
    prefix="cann",
    suffixes=frozenset({".toy"}),
    kernel_keys={"toy-archs": Key(toml_schema.list_of(toml_schema.text), required=True)},
    table=TABLE,
    recipe="toy 1",
    defines=("-DUSE_TOY",),
    linked_if_called=(LinkedIfCalled(RUNTIME, symbols=" toy_", but_not=" toy_debug"),),
    has_archs=True,
)
