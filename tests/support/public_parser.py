"""The public parser of `build.toml` on files of edition 6: that of client 0.17.2 reads edition 5.

The package index has no client with a parser of edition 6. The editions differ in the spelling of a few keys alone,
which are restated here from the parser's sources (kernels-common/src/config/v6.rs, release 0.18).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli
from kernels._rust import Build

_DEPENDS = {"python-depends", "kernel-depends"}
_CODE = {"src", "include", "pyext", "cxx-flags"}
_KERNEL = {"language", "depends", "src"}
_CPP = {*_KERNEL, "include", "cxx-flags"}
# The keys of each table. A kernel's table has those of its language.
KEYS: Mapping[str, set[str]] = {
    "": {"general", "torch", "torch-noarch", "tvm-ffi", "kernel"},
    "general": {"name", "version", "edition", "license", "backends", "upstream", "source", *_DEPENDS}
    | {"hub", "cuda", "neuron", "tpu", "xpu"},
    "general.hub": {"repo-id", "branch"},
    "general.cuda": {*_DEPENDS, "minver", "maxver"},
    "general.neuron": _DEPENDS,
    "general.tpu": {"python-depends"},
    "general.xpu": _DEPENDS,
    "torch": {*_CODE, "minver", "maxver", "stable-abi"},
    "torch-noarch": {"pyext", "cuda_capabilities", "rocm_archs"},
    "tvm-ffi": _CODE,
    "cpp-cpu": _CPP,
    "cpp-cuda": {*_CPP, "cuda-capabilities", "cuda-flags", "cuda-minver"},
    "cpp-metal": _CPP,
    "cpp-rocm": {*_CPP, "rocm-archs", "hip-flags"},
    "cpp-xpu": {*_CPP, "sycl-flags"},
    "rust-cpu": {*_KERNEL, "cargo-manifest"},
}


def unknown_keys(text: str) -> list[str]:
    """Return the keys of a file that the parser of edition 6 does not know, and kernels whose language it lacks."""
    document: dict[str, Any] = tomli.loads(text)
    general = document.get("general", {})
    tables = {"": document} | {name: table for name, table in document.items() if name != "kernel"}
    tables |= {f"general.{name}": table for name, table in general.items() if isinstance(table, dict)}
    found = [f"{name}: {key}" for name, table in tables.items() for key in table if key not in KEYS.get(name, ())]
    for name, kernel in document.get("kernel", {}).items():
        language = kernel.get("language", "")
        keys = KEYS[language] if re.fullmatch(r"(cpp|rust)-\w+", language) and language in KEYS else set()
        found += [f"kernel.{name} ({language}): {key}" for key in kernel if key not in keys]
        if language == "rust-cpu" and "tvm-ffi" not in document:
            found.append(f"kernel.{name}: rust-cpu without [tvm-ffi]")
    return found


def in_edition_5(text: str) -> str:
    """Return a file of edition 6 in edition 5. Rust and several upstream repositories have no spelling there."""
    text = re.sub(r"\blanguage(\s*)= (['\"])cpp-", r"backend\1= \2", text.replace("edition = 6", "edition = 5"))
    return re.sub(r'\bupstream = \[("[^"]*")\]', r"upstream = \1", text)


def read(text: str, directory: Path) -> Build:
    """Read a file of edition 6, which is written to a directory in edition 5.

    Raises:
        ValueError: If the public parser rejects it, or its edition is another one.
    """
    found = unknown_keys(text)
    if found or tomli.loads(text)["general"]["edition"] != 6:
        raise ValueError(f"not edition 6; unknown keys: {found}")
    (directory / "build.toml").write_bytes(in_edition_5(text).encode())
    return Build.open(directory)
