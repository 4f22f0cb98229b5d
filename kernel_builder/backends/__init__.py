"""Back ends: one file or directory for each, with everything specific to it. This module has their protocol.

`Variant.backend` and `Project.backends` hold them as values; `config.known_backends` finds one by its name. The
toolchains of a build are a later stage; a back end sees them as a `ToolchainSource`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from kernel_builder import toml_file
from kernel_builder.backends.host_code import CompileOptions, Compiler
from kernel_builder.backends.tools import HeaderLibrary, HostCompiler, Obstacle, ToolchainSource, Toolkit
from kernel_builder.config import known_backends, matrix
from kernel_builder.config.project import Backend, Kernel
from kernel_format.release import Release
from kernel_format.variant import Abi

# The component with the clang that several back ends compile with; `config/matrix.toml` has it.
CLANG = "clang-22"


@dataclass(frozen=True)
class DeviceCommand:
    """How a source is compiled."""

    argv: tuple[str, ...]  # the command without its output, with tokens
    compiler: Compiler
    generated: Mapping[str, str]  # path in the step's directory -> content of files that the command needs


@dataclass(frozen=True)
class LinkedIfCalled:
    """A library that is linked only if a binary leaves symbols undefined that match `symbols` and not `but_not`.

    Both are expressions of grep for the lines of `nm`.
    """

    library: str
    symbols: str
    but_not: str


@dataclass(frozen=True)
class SymbolFamily:
    """Symbols that match `names` and are defined by libraries (`DT_NEEDED` entries) that match `libraries`."""

    title: str  # the name of their library in messages
    names: re.Pattern[str]
    libraries: re.Pattern[str]
    hint: str  # the remedy if no needed library defines them


@dataclass(frozen=True)
class DeviceCode:
    """Code for one architecture, of one source, in a binary.

    Attributes:
        arch: The architecture, as metadata lists it without `+PTX`.
        is_ptx: Whether the driver compiles it, also for later architectures.
        size: The size in the binary in bytes, compressed or not.
        source: The number of the source among those of the binary.
        kernels: The mangled names of its kernels; empty if the code is compressed.
    """

    arch: str
    is_ptx: bool
    size: int
    source: int
    kernels: tuple[str, ...] = ()


# Returns `length` bytes of a binary from `offset` on; a binary on a Hub is downloaded by parts.
ReadAt = Callable[[int, int], bytes]


def reading(binary: Path) -> ReadAt:
    """Return the function for a file."""
    data = binary.read_bytes()
    return lambda offset, length: data[offset : offset + length]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompiledBackend(Backend):
    """A back end that the builder compiles for. By default it has no releases, and g++ compiles all of its sources."""

    compiles: ClassVar[bool] = True

    # A TOML file. `[torch."2.10"] releases` are the releases that a Torch release is published for; `[release."13.0"]`
    # describes a release.
    table: Path | None = None
    preference: int = 2
    defines: tuple[str, ...] = ()  # options for all sources
    # Headers, as `#include` names them, that need the toolkit's libraries; None if there are none.
    library_headers: re.Pattern[str] | None = None
    # Libraries of the device that a binary names as needed only if it calls them.
    linked_if_called: tuple[LinkedIfCalled, ...] = ()
    # The threads that a warp of its devices may have, for the emulator; empty if that cannot emulate it.
    warp_sizes: tuple[int, ...] = ()
    translates: CompiledBackend | None = None  # the back end whose sources hipify translates to its own; None for none
    shims_of: str = ""  # the back end in `torch_shims.toml` whose functions these libraries define; empty for its own
    looks_like: re.Pattern[str] | None = None  # names of libraries that are of its devices; None for none

    # The matrix.

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The content of `table`."""
        return toml_file.read(self.table) if self.table else {}

    def published(self) -> Mapping[Release, Sequence[Release | None]]:
        if not self.table:
            return dict.fromkeys(matrix.load().torch, (None,))
        rows = ((Release.parse(torch), entry["releases"]) for torch, entry in self.data["torch"].items())
        return dict(sorted((torch, sorted(map(Release.parse, releases))) for torch, releases in rows))

    def releases(self) -> Sequence[Release | None]:
        return sorted(map(Release.parse, self.data["release"])) if self.table else (None,)

    def archs(self, kernels: Sequence[Kernel], release: Release | None, platform: str) -> tuple[str, ...]:
        """Return the architectures that a binary of these kernels has code for, as its metadata lists them."""
        return ()

    # Toolchains.

    def obstacle(
        self, toolchains: ToolchainSource, release: Release | None, *, with_torch: bool = True
    ) -> Obstacle | None:
        """Return why a release cannot be compiled for on this machine, or None if it can. No network.

        Args:
            with_torch: Whether Torch brings the device's runtime; else the binary has to have it itself.
        """
        return None

    def toolkit(self, toolchains: ToolchainSource, release: Release | None) -> Toolkit | None:
        """Return the compiler for a release, fetched if need be; None if g++ is enough."""
        return None

    def toolkit_libraries(self, toolchains: ToolchainSource, toolkit: Toolkit) -> HeaderLibrary | None:
        """Return the headers of the toolkit's libraries, for sources that include `library_headers`; None for none."""
        return None

    def provenance(self, toolkit: Toolkit | None) -> Mapping[str, str]:
        """Return the compiler's entries in the metadata, besides the release in the variant's name."""
        return {}

    def shell(self, toolkit: Toolkit, host: HostCompiler) -> tuple[Sequence[Path], Mapping[str, str]]:
        """Return the directories of programs and the variables to compile by hand in a shell."""
        return (), {}

    # Steps.

    def check_flags(self, project: Path, table: str, kernel: Kernel) -> None:
        """Raise a ConfigError if a flag for the back end's own compiler is not allowed."""

    def check_source(self, project: Path, table: str, kernel: Kernel, source: str) -> None:
        """Raise a ConfigError if its own compiler cannot compile a source by the look of it."""

    def device_roots(self, toolkit: Toolkit | None) -> Mapping[str, Path]:
        """Return token -> directory, for directories that only its own compiler needs besides the toolkit's root."""
        return {}

    def device_command(self, host: HostCompiler, toolkit: Toolkit | None, options: CompileOptions) -> DeviceCommand:
        """Return how its own compiler compiles a source whose ending is in `suffixes`."""
        raise NotImplementedError(self.name)

    @property
    def linked_libraries(self) -> frozenset[str]:
        """The libraries that links of the back end may name, besides those of all back ends."""
        torch = (name for stable in (False, True) for name in self.torch_libraries(stable=stable))
        return frozenset([*torch, *(linked.library for linked in self.linked_if_called)])

    def torch_libraries(self, *, stable: bool) -> tuple[str, ...]:
        """Return the libraries of Torch that a binary names as needed, besides those of all back ends."""
        names = () if not self.torch_version else ("torch",) if stable else ("c10", "torch")
        return tuple(f"lib{name}_{self.torch_version}.so" for name in names)

    def static_runtime(self, toolkit: Toolkit | None) -> Path | None:
        """Return the static library of the device's runtime, for a binary without Torch, which would bring it."""
        return None

    # Checks.

    def needed_libraries(self, release: Release | None) -> frozenset[str]:
        """Return the libraries of the device that a binary for a release, or for any, may need."""
        return frozenset(self.torch_libraries(stable=False))

    @property
    def link_torch(self) -> str:
        """The remedy for a symbol of a library that Torch loads."""
        return f"link with libtorch_{self.torch_version}.so, which loads the {self.title} libraries that Torch uses"

    @property
    def torch_part(self) -> SymbolFamily | None:
        """The symbols of Torch's own libraries for the back end; None if it has none."""
        if not (name := self.torch_version):
            return None
        names = re.compile(rf"_Z(?:T[ISV])?N[KVrRO]*(?:2at|3c10){len(name)}{name}")
        libraries = re.compile(rf"lib(?:torch|c10)_{name}\.so")
        return SymbolFamily(f"Torch's {self.title} part", names, libraries, self.link_torch)

    def symbol_families(self, framework: Abi | None) -> Sequence[SymbolFamily]:
        """Return the symbols that a binary may leave undefined, because Torch has loaded the libraries."""
        return ()

    def device_code(self, binary: Path, read_at: ReadAt) -> Sequence[DeviceCode] | None:
        """Return the device code of a binary; None if the builder does not read that of the back end.

        Raises:
            Unreadable: If the code is damaged.
        """
        return None

    def lacking(self, symbol: str, release: Release) -> str | None:
        """Return why some clients that load a variant of a release lack a symbol, or None if all have it."""
        return None


def compiled(backend: Backend) -> CompiledBackend:
    """Return the back end of a compiled variant, which is one that the builder compiles for."""
    assert isinstance(backend, CompiledBackend), backend
    return backend


def every() -> tuple[CompiledBackend, ...]:
    """Return the back ends that the builder compiles for."""
    return tuple(map(compiled, known_backends.compiled_for()))
