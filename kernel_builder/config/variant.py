"""Variants: framework, backend and platform of a package, and the directory name that the public client looks for.

The names follow the grammar of `kernels.variants.parse_variant`:

    torch214-cxx11-cu130-x86_64-linux        full C++ ABI of one Torch release
    torch-stable-abi210-cu130-x86_64-linux   stable ABI, this Torch release and later
    torch-cuda                               Python only
    tvm-ffi01-cu130-x86_64-linux             without Torch, for TVM FFI 0.1
"""

from __future__ import annotations

import platform as _platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kernel_builder.config import known_backends
from kernel_format.errors import VariantError
from kernel_format.release import Release

__all__ = ["PLATFORMS", "Abi", "FullAbi", "Noarch", "Release", "StableAbi", "TvmFfiAbi", "Variant", "this_platform"]

PLATFORMS = ("x86_64-linux", "aarch64-linux")

# Why there are no compiled packages for other systems, which the public client knows.
_NOT_COMPILED_FOR = {
    "windows": "what can be had without a licence compiles for MinGW, and Torch, which Microsoft's compiler has built, "
    "cannot catch the exceptions of such a binary",
    "darwin": "nothing here can run what it would compile for macOS, and Metal's compiler is Apple's; a Python-only "
    "project has the variant torch-metal",
}


@dataclass(frozen=True)
class FullAbi:
    """The full C++ ABI of one Torch release."""

    release: Release

    def __str__(self) -> str:
        return f"torch{self.release.digits}-cxx11"


@dataclass(frozen=True)
class StableAbi:
    """Torch's stable ABI: this release and every later one."""

    release: Release

    def __str__(self) -> str:
        return f"torch-stable-abi{self.release.digits}"


@dataclass(frozen=True)
class TvmFfiAbi:
    """The C interface of one release of TVM FFI, without Torch."""

    release: Release

    def __str__(self) -> str:
        return f"tvm-ffi{self.release.digits}"


@dataclass(frozen=True)
class Noarch:
    """Python only, any Torch."""

    def __str__(self) -> str:
        return "torch"


Abi = FullAbi | StableAbi | TvmFfiAbi | Noarch
# By the groups of names of compiled variants.
_ABIS: Mapping[str, type[FullAbi | StableAbi | TvmFfiAbi]] = {"torch": FullAbi, "stable": StableAbi, "tvm": TvmFfiAbi}


@dataclass(frozen=True)
class Variant:
    """Framework x backend x platform.

    Attributes:
        release: The release of the backend, such as that of CUDA; None if it has none, or for a Python-only variant.
        platform: For example `x86_64-linux`; None for a Python-only variant.
    """

    framework: Abi
    backend: str
    release: Release | None = None
    platform: str | None = None

    @property
    def name(self) -> str:
        """The directory name under `build/`."""
        if self.platform is None:
            return f"{self.framework}-{self.backend}"
        return f"{self.framework}-{known_backends.get(self.backend).spelled(self.release)}-{self.platform}"

    @property
    def title(self) -> str:
        """The backend as tables call it, such as `CUDA`."""
        return known_backends.get(self.backend).title

    @property
    def target(self) -> str:
        """The backend with its release, as progress reports say it: `cuda 13.0`."""
        return f"{self.backend} {self.release}" if self.release else self.backend

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def parse(name: str) -> Variant:
        """Read a variant's directory name.

        Raises:
            VariantError: If the name does not follow the grammar, or names a framework, backend or platform that the
                builder does not build.
        """
        noarch = re.fullmatch(r"torch-([a-z]+)", name)
        if noarch and known_backends.find(noarch[1]):
            return Variant(Noarch(), noarch[1])
        match = re.fullmatch(
            r"(?:torch(?P<torch>\d\d+)-cxx11|torch-stable-abi(?P<stable>\d\d+)|tvm-ffi(?P<tvm>\d\d+))"
            r"-(?P<backend>[a-z0-9]+)-(?P<platform>[a-z0-9_]+-[a-z]+)",
            name,
        )
        spelled = match["backend"] if match and match["platform"] in PLATFORMS else ""
        backend = next((known for known in known_backends.compiled_for() if known.is_spelled(spelled)), None)
        if not match or not backend:
            platform, _, system = name.rpartition("-")
            if platform and (reason := _NOT_COMPILED_FOR.get(system)):
                raise VariantError(
                    f"this builder does not compile for {system}: {reason}",
                    where=name,
                    hint=f"it compiles for {' and '.join(PLATFORMS)}",
                )
            raise VariantError(
                "is not a variant's name; expected for example torch214-cxx11-cu130-x86_64-linux, "
                "torch-stable-abi210-cpu-x86_64-linux or torch-cuda",
                where=name,
                hint="`kernel-builder list-variants DIR` lists the variants of a project",
            )
        abi = next(known for group, known in _ABIS.items() if match[group])
        framework = abi(Release.from_digits(match["torch"] or match["stable"] or match["tvm"]))
        return Variant(framework, backend.name, backend.release_of(spelled), match["platform"])


def this_platform() -> str:
    """Return the platform of this machine as variant names write it, for example `x86_64-linux`."""
    machine = _platform.machine().lower()
    return f"{'aarch64' if machine == 'arm64' else machine}-{_platform.system().lower()}"
