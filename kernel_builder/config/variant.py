"""Variants: framework, backend and platform of a package, and the directory name that the public client looks for.

The names follow the grammar of `kernels.variants.parse_variant`:

    torch214-cxx11-cu130-x86_64-linux        full C++ ABI of one Torch release
    torch-stable-abi210-cu130-x86_64-linux   stable ABI, this Torch release and later
    torch-cuda                               Python only
"""

from __future__ import annotations

import platform as _platform
import re
from dataclasses import dataclass
from typing import NamedTuple

from kernel_builder.errors import VariantError

BACKENDS = ("cann", "cpu", "cuda", "metal", "neuron", "rocm", "tpu", "xpu")
PLATFORMS = ("x86_64-linux", "aarch64-linux")


class Release(NamedTuple):
    """A `major.minor` version of Torch or CUDA, ordered as numbers."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @property
    def digits(self) -> str:
        """The release as variant names write it: `2.10` is `210`."""
        return f"{self.major}{self.minor}"

    @staticmethod
    def parse(text: str) -> Release:
        """Read `2.10` or `2.10.0`.

        Raises:
            ValueError: If `text` is not dotted digits with at least a major and a minor part.
        """
        match = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)*", text)
        if not match:
            raise ValueError(f"{text!r} is not a version like 2.10")
        return Release(int(match[1]), int(match[2]))

    @staticmethod
    def from_digits(digits: str) -> Release:
        """Read the one-digit major and the minor of a Torch name (`210`)."""
        return Release(int(digits[0]), int(digits[1:]))


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
class Noarch:
    """Python only, any Torch."""

    def __str__(self) -> str:
        return "torch"


@dataclass(frozen=True)
class Variant:
    """Framework x backend x platform.

    Attributes:
        cuda: The CUDA release, set if and only if a compiled variant's backend is `cuda`.
        platform: For example `x86_64-linux`; None for a Python-only variant.
    """

    framework: FullAbi | StableAbi | Noarch
    backend: str
    cuda: Release | None = None
    platform: str | None = None

    @property
    def name(self) -> str:
        """The directory name under `build/`."""
        if self.platform is None:
            return f"{self.framework}-{self.backend}"
        backend = f"cu{self.cuda.digits}" if self.cuda else self.backend
        return f"{self.framework}-{backend}-{self.platform}"

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
        if noarch and noarch[1] in BACKENDS:
            return Variant(Noarch(), noarch[1])
        match = re.fullmatch(
            r"(?:torch(?P<torch>\d\d+)-cxx11|torch-stable-abi(?P<stable>\d\d+))"
            r"-(?:cu(?P<cuda>\d\d+)|(?P<cpu>cpu))-(?P<platform>[a-z0-9_]+-[a-z]+)",
            name,
        )
        if not match or match["platform"] not in PLATFORMS:
            raise VariantError(
                "is not a variant's name; expected for example torch214-cxx11-cu130-x86_64-linux, "
                "torch-stable-abi210-cpu-x86_64-linux or torch-cuda",
                where=name,
                hint="`kernel-builder list-variants DIR` lists the variants of a project",
            )
        framework = (
            FullAbi(Release.from_digits(match["torch"]))
            if match["torch"]
            else StableAbi(Release.from_digits(match["stable"]))
        )
        if match["cpu"]:
            return Variant(framework, "cpu", None, match["platform"])
        cuda = Release(int(match["cuda"][:-1]), int(match["cuda"][-1]))
        return Variant(framework, "cuda", cuda, match["platform"])


def this_platform() -> str:
    """Return the platform of this machine as variant names write it, for example `x86_64-linux`."""
    machine = _platform.machine().lower()
    return f"{'aarch64' if machine == 'arm64' else machine}-{_platform.system().lower()}"
