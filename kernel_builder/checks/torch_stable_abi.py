"""Check that a binary which claims Torch's stable ABI uses nothing of Torch but that ABI's C functions.

`torch_shims.toml` lists the functions and the Torch release that introduced each. Header-only C++ code of Torch may be
compiled into a binary, but no C++ symbol of Torch may be left undefined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernel_builder import toml_file
from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable
from kernel_builder.config.variant import Release, StableAbi
from kernel_builder.demangle import demangle

NAME = "torch-stable-abi"

# A mangled name (function, variable, vtable, type info, guard) in a namespace of Torch.
TORCH_CPP = re.compile(r"_Z(?:T[CISTVW]|GV)?N[KVrRO]*(?:2at|3c10|4c10d|5torch|6caffe2)")
# Torch's C functions and its Python bindings, stable or not.
TORCH_C = re.compile(r"(?:aoti_)?torch_[a-z]|aoti_record_|_?THP")


@dataclass(frozen=True)
class Shims:
    """The C functions of the stable ABI: the release that introduced each, and those of one back end only."""

    since: Mapping[str, Release]
    of_backend: Mapping[str, frozenset[str]]


@cache
def shims() -> Shims:
    """Return the functions that this version of the builder knows."""
    data = toml_file.read(Path(__file__).with_name("torch_shims.toml"))
    since = {name: Release.parse(release) for release, names in data["release"].items() for name in names}
    return Shims(since, {backend: frozenset(names) for backend, names in data["library"].items()})


def check_torch_stable_abi(package: CheckedPackage) -> Iterator[Finding]:
    claimed = package.policy.torch_stable
    if claimed is None:
        if package.variant is None or not isinstance(package.variant.framework, StableAbi):
            raise NotApplicable("the variant does not claim the stable ABI")
        claimed = package.variant.framework.release
    since = shims().since
    oldest, newest = min(since.values()), max(since.values())
    if claimed < oldest:
        raise NotApplicable(f"nothing is known about the stable ABI of Torch {claimed}; the data starts at {oldest}")
    for binary in package.binaries:
        foreign = []
        for symbol in binary.undefined:
            name = symbol.name
            if name in since:
                if since[name] > claimed:
                    yield _too_new(binary.name, name, since[name], claimed)
            elif TORCH_CPP.match(name) or (TORCH_C.match(name) and claimed <= newest):
                foreign.append(name)
        for readable in demangle(foreign).values():
            yield Finding(
                NAME,
                binary.name,
                f"uses {readable}, which is not part of Torch's stable ABI",
                "include only headers of torch/csrc/stable and torch/headeronly, "
                "or remove the backend from `stable-abi` in build.toml",
            )


def _too_new(path: str, name: str, since: Release, claimed: Release) -> Finding:
    return Finding(
        NAME,
        path,
        f"uses {name}, which is new in Torch {since}; the binary must load in {claimed}",
        f'set `stable-abi = "{since}"` in build.toml, or use it only where '
        f"TORCH_FEATURE_VERSION >= TORCH_VERSION_{since.major}_{since.minor}_0",
    )
