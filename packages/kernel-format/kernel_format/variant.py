"""Variants: framework, back end and platform of a package, and the directory name that the public client looks for.

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
from typing import ClassVar

from kernel_format.errors import VariantError
from kernel_format.release import Release


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Backend:
    """The spelling of a back end in variant names.

    Attributes:
        name: The name in `build.toml` and in Python-only variants.
        title: The name in messages and tables, such as `CUDA`.
        prefix: The prefix of its release in names of compiled variants: `cu`, as in `cu130`. None for a back end
            without releases, which is spelled by its name.
    """

    name: str
    title: str
    prefix: str | None = None

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<back end {self.name}>"

    def spelled(self, release: Release | None) -> str:
        """Return the back end and its release as names of compiled variants write them."""
        return f"{self.prefix}{release.digits}" if release else self.name

    def is_spelled(self, text: str) -> bool:
        """Return whether names of compiled variants write the back end as `text`."""
        return re.fullmatch(rf"{self.prefix}\d\d+", text) is not None if self.prefix else text == self.name

    def release_of(self, text: str) -> Release | None:
        """Return the release in a text that `is_spelled`: the last digit is the minor."""
        digits = text.removeprefix(self.prefix or text)
        return Release(int(digits[:-1]), int(digits[-1])) if digits else None


BACKENDS = (
    Backend(name="cann", title="CANN", prefix="cann"),
    Backend(name="cpu", title="CPU"),
    Backend(name="cuda", title="CUDA", prefix="cu"),
    Backend(name="metal", title="Metal"),
    Backend(name="neuron", title="Neuron"),
    Backend(name="rocm", title="ROCm", prefix="rocm"),
    Backend(name="tpu", title="TPU"),
    Backend(name="xpu", title="XPU", prefix="xpu"),
)
"""The back ends that the public client knows."""


@dataclass(frozen=True)
class _Versioned:
    spelling: ClassVar[str]

    release: Release

    def __str__(self) -> str:
        return self.spelling.format(self.release.digits)


class FullAbi(_Versioned):
    """The full C++ ABI of one Torch release."""

    spelling = "torch{}-cxx11"


class StableAbi(_Versioned):
    """Torch's stable ABI: this release and every later one."""

    spelling = "torch-stable-abi{}"


class TvmFfiAbi(_Versioned):
    """The C interface of one release of TVM FFI, without Torch."""

    spelling = "tvm-ffi{}"


@dataclass(frozen=True)
class Noarch:
    """Python only, any Torch."""

    def __str__(self) -> str:
        return "torch"


Abi = FullAbi | StableAbi | TvmFfiAbi | Noarch
# Names for other systems leave out `-cxx11`.
_CXX11_SYSTEM = "-linux"
# By the groups of the grammar.
_ABIS: Mapping[str, type[FullAbi | StableAbi | TvmFfiAbi]] = {"torch": FullAbi, "stable": StableAbi, "tvm": TvmFfiAbi}


@dataclass(frozen=True)
class Variant:
    """Framework x back end x platform.

    Attributes:
        release: The release of the back end, such as CUDA's; None if it has none, or for a Python-only variant.
        platform: For example `x86_64-linux`; None for a Python-only variant.
    """

    framework: Abi
    backend: Backend
    release: Release | None = None
    platform: str | None = None

    @property
    def name(self) -> str:
        """The directory name under `build/`."""
        if self.platform is None:
            return f"{self.framework}-{self.backend.name}"
        framework = str(self.framework)
        if not self.platform.endswith(_CXX11_SYSTEM):
            framework = framework.removesuffix("-cxx11")
        return f"{framework}-{self.backend.spelled(self.release)}-{self.platform}"

    @property
    def target(self) -> str:
        """The back end with its release, for progress reports: `cuda 13.0`."""
        return f"{self.backend.name} {self.release}" if self.release else self.backend.name

    def __str__(self) -> str:
        return self.name


def parse(name: str) -> Variant:
    """Read a variant's directory name, also of a variant that the builder does not build.

    Raises:
        VariantError: If the name does not follow the grammar, or names no back end of `BACKENDS`.
    """
    if noarch := re.fullmatch(r"torch-([a-z]+)", name):
        for backend in (backend for backend in BACKENDS if backend.name == noarch[1]):
            return Variant(Noarch(), backend)
    match = re.fullmatch(
        r"(?:torch(?P<torch>\d\d+)(?P<cxx11>-cxx11)?|torch-stable-abi(?P<stable>\d\d+)|tvm-ffi(?P<tvm>\d\d+))"
        r"-(?P<backend>[a-z0-9]+)-(?P<platform>[a-z0-9_]+-[a-z]+)",
        name,
    )
    if match and (not match["torch"] or bool(match["cxx11"]) is name.endswith(_CXX11_SYSTEM)):
        group = next(group for group in _ABIS if match[group])
        framework = _ABIS[group](Release(int(match[group][0]), int(match[group][1:])))
        for backend in (backend for backend in BACKENDS if backend.is_spelled(match["backend"])):
            return Variant(framework, backend, backend.release_of(match["backend"]), match["platform"])
    raise VariantError(
        "is not a variant's name; expected for example torch214-cxx11-cu130-x86_64-linux, "
        "torch-stable-abi210-cpu-x86_64-linux or torch-cuda",
        where=name,
        hint="`kernel-builder list-variants DIR` lists the variants of a project",
    )


def this_platform() -> str:
    """Return the platform of this machine as variant names write it, for example `x86_64-linux`."""
    machine = _platform.machine().lower()
    return f"{'aarch64' if machine == 'arm64' else machine}-{_platform.system().lower()}"
