"""Check that a binary needs only symbol versions of glibc and libstdc++ that the oldest supported system has.

The policies are auditwheel's data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.policy import WheelPolicies

from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable
from kernel_builder.demangle import demangle

NAME = "manylinux"

_HINTS = {
    "GLIBC": "call an older function of the C library, or define this one in a source of `src`",
    "GLIBCXX": "avoid this part of the C++ library, or define it in a source of `src`",
    "CXXABI": "avoid the language feature that needs it, or define it in a source of `src`",
    "GCC": "avoid the builtin that needs it, or link libgcc statically (`-static-libgcc`)",
}


def policy_names() -> list[str]:
    """Return the names of all policies, oldest system first."""
    names = [policy.name.removesuffix("_x86_64") for policy in _policies("x86_64")]
    return [name for name in reversed(names) if name != "linux"]


def check_manylinux(package: CheckedPackage) -> Iterator[Finding]:
    for binary in package.binaries:
        if binary.machine not in ("x86_64", "aarch64"):
            raise NotApplicable(f"{binary.name} is for {binary.machine}")
        try:
            policy = _policies(binary.machine).get_policy_by_name(f"{package.policy.manylinux}_{binary.machine}")
        except LookupError as error:
            raise NotApplicable(f"{package.policy.manylinux} has no policy for {binary.machine}") from error
        too_new = [version for version in binary.versions if not _allowed(policy.symbol_versions, version)]
        users = {version: [s.name for s in binary.undefined if s.version == version] for version in too_new}
        readable = demangle(name for names in users.values() for name in names)
        for version, names in users.items():
            family = version.partition("_")[0]
            # A version without a symbol, such as GLIBC_ABI_DT_RELR, is a requirement on the runtime as a whole.
            for text in [f"{readable[name]}@{version}" for name in names] or [version]:
                newest = _newest(policy.symbol_versions[family])
                yield Finding(
                    NAME,
                    binary.name,
                    f"needs {text}; {package.policy.manylinux} has {family} up to {newest}",
                    _HINTS.get(family, "build against older libraries"),
                )


@cache
def _policies(machine: str) -> Any:
    return WheelPolicies(libc=Libc.GLIBC, arch=Architecture(machine))


def _allowed(families: Mapping[str, frozenset[str]], version: str) -> bool:
    """Return whether a policy allows `version`, for example `GLIBC_2.28`; it allows families that it does not list."""
    family, _, number = version.partition("_")
    return family not in families or number in families[family]


def _newest(numbers: frozenset[str]) -> str:
    return max(
        (number for number in numbers if number[0].isdigit()),
        key=lambda number: [int(part) for part in number.split(".")],
    )
