"""The libraries and symbols that a CUDA binary may leave undefined, because Torch has loaded them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from kernel_builder import toml_file
from kernel_builder.backends import SymbolFamily
from kernel_builder.backends.cuda.releases import DATA, TABLE
from kernel_format.release import Release
from kernel_format.variant import Abi, FullAbi, StableAbi, TvmFfiAbi

_HINTS = {"cuda": "get the function with cudaGetDriverEntryPoint, or "}
OF_RUNTIME = re.compile(r"(?:__)?cuda[A-Z]")


@cache
def symbol_families(framework: Abi | None, link_torch: str) -> tuple[SymbolFamily, ...]:
    libraries: Mapping[str, Mapping[str, Any]] = DATA["library"]
    prefixes = {stem: known for stem, entry in libraries.items() if (known := entry.get("symbols", stem))}
    families = []
    # The longest first: the prefix of the driver begins the names of other libraries.
    for stem in sorted(prefixes, key=lambda stem: len(prefixes[stem]), reverse=True):
        own = rf"lib{stem}\.so"
        loaded = _is_loaded(libraries[stem], framework)
        families.append(
            SymbolFamily(
                libraries[stem].get("title", f"lib{stem}"),
                re.compile(rf"(?:__)?{prefixes[stem]}[A-Z]"),
                re.compile(rf"libtorch_cuda\.so|{own}" if loaded else own),
                link_torch if loaded else f"{_HINTS.get(stem, '')}open lib{stem}.so with dlopen when it is called",
            )
        )
    return tuple(families)


def _is_loaded(entry: Mapping[str, Any], framework: Abi | None) -> bool:
    """Return whether libtorch_cuda.so loads a library in every Torch release that a binary has to load in."""
    if not entry.get("loaded", True) or isinstance(framework, TvmFfiAbi):
        return False
    if not isinstance(framework, (FullAbi, StableAbi)):
        return True
    if "since" in entry and framework.release < Release.parse(entry["since"]):
        return False
    return "until" not in entry or (
        isinstance(framework, FullAbi) and framework.release <= Release.parse(entry["until"])
    )


@cache
def runtime_exports() -> Mapping[Release, frozenset[str]]:
    """Return CUDA release -> the functions of its runtime.

    A binary leaves them undefined, without a version, and takes those of the libcudart that Torch has loaded. One that
    uses only functions that the runtimes of CUDA 12 and 13 both export works with every Torch of both.
    """
    data = toml_file.read(TABLE.with_name("cuda_runtimes.toml"))
    every = frozenset(data["every"])
    return {Release.parse(release): every | frozenset(own) for release, own in data["release"].items()}
