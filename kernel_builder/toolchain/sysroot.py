"""The libraries that binaries are linked against, as a link finds them. `stub_libraries` builds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_EVERYWHERE = (
    "libstdc++.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libc.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
)
# Vector functions, which are newer than glibc 2.28 on aarch64, and the dynamic linker, for thread-local variables.
RUNTIME_LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "x86_64-linux": (*_EVERYWHERE, "libmvec.so.1", "ld-linux-x86-64.so.2"),
    "aarch64-linux": (*_EVERYWHERE, "ld-linux-aarch64.so.1"),
}

# Their stubs are empty. This is part of the recipe, so those of other back ends are in sysroots of other names.
UNVERSIONED_LIBRARIES = (
    "libc10.so",
    "libtorch_cpu.so",
    "libtorch.so",
    "libc10_cuda.so",
    "libtorch_cuda.so",
    "libcuda.so.1",
)

# Increase when `stub_libraries.make` changes, so that the sysroot of an older builder is not used.
RECIPE = 4


@dataclass(frozen=True)
class Sysroot:
    """A directory of libraries to link against.

    Attributes:
        root: The directory with `lib/` (the stubs) and `too-new.json`.
        platform: The platform of the libraries.
    """

    root: Path
    platform: str

    @property
    def lib(self) -> Path:
        return self.root / "lib"

    @property
    def runtime_arguments(self) -> list[str]:
        """The arguments that replace the compiler's default libraries at the end of a link command."""
        dynamic = [f"-l:{name}" for name in RUNTIME_LIBRARIES[self.platform]]
        return ["-l:libcompat.a", "-Wl,--as-needed", *dynamic, "-lgcc", "-Wl,--no-as-needed"]

    def too_new(self) -> Mapping[str, str]:
        """Return symbol -> its oldest version, for symbols that this machine has only above the ceiling."""
        loaded: dict[str, str] = json.loads((self.root / "too-new.json").read_text())
        return loaded
