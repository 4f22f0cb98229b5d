"""The public parser's rules for edition 6 of `build.toml`, restated from its sources (kernels-common, release 0.18).

The package index ends at `kernels` 0.17.2, whose parser knows edition 5 only. The tests compare these rules with that
parser, on files that differ in the edition alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

BACKENDS = ("cann", "cpu", "cuda", "metal", "neuron", "rocm", "tpu", "xpu")
CUTLASS = [f"cutlass_{version}" for version in ("2_10", "3_5", "3_6", "3_8", "3_9", "4_0", "4_4", "4_5")]
Rule = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _matches(pattern: str) -> Rule:
    return lambda value: _text(value) and re.fullmatch(pattern, value, re.ASCII) is not None


def _list(rule: Rule) -> Rule:
    return lambda value: isinstance(value, list) and all(map(rule, value))


def _either(*rules: Rule) -> Rule:
    return lambda value: any(rule(value) for rule in rules)


def _table(rules: Mapping[str, Rule]) -> Rule:
    return lambda value: not list(_faults(value, rules))


def _faults(table: Any, rules: Mapping[str, Rule]) -> Iterator[str]:
    """Yield the keys of a table that are unknown, invalid or missing. Required keys end in `!`."""
    if not isinstance(table, dict):
        yield "is no table"
        return
    known = {key.rstrip("!"): rule for key, rule in rules.items()}
    yield from (key for key, value in table.items() if key not in known or not known[key](value))
    yield from (key for key in rules if key.endswith("!") and key[:-1] not in table)


_TEXTS = _list(_text)
_VERSION = _matches(r"\d+(\.\d+)?")
_URL = _matches(r"(git\+)?(https?|ssh|git)://(\w+@)?[\w.-]+\w(:\d{1,4})?/\S+|git@[\w.]+:[^\s:]+")
_DEPENDS = _list(
    _either(_table({"repo-id!": _text, "version!": _natural}), _table({"repo-id!": _text, "revision!": _text}))
)
_LIBRARIES = _list(lambda value: value in ("torch", "sycl_tla", "metal-cpp", *CUTLASS))
_KERNEL = {"language!": _text, "depends!": _LIBRARIES, "src!": _TEXTS}
_CPP = {**_KERNEL, "cxx-flags": _TEXTS, "include": _TEXTS}
_CUDA = {"cuda-capabilities": _TEXTS, "cuda-flags": _TEXTS, "cuda-minver": _VERSION}
KERNELS: Mapping[str, Mapping[str, Rule]] = {
    "cpp-cpu": _CPP,
    "cpp-cuda": {**_CPP, **_CUDA},
    "cpp-metal": _CPP,
    "cpp-rocm": {**_CPP, "rocm-archs": _TEXTS, "hip-flags": _TEXTS},
    "cpp-xpu": {**_CPP, "sycl-flags": _TEXTS},
    "rust-cpu": {**_KERNEL, "cargo-manifest!": _text},
}
_PYTHON = {"python-depends": _TEXTS}
_BOTH = {**_PYTHON, "kernel-depends": _DEPENDS}
_CODE = {"src": _TEXTS, "include": _TEXTS, "pyext": _TEXTS, "cxx-flags": _TEXTS}
_RANGE = {"minver": _VERSION, "maxver": _VERSION}
TABLES: Mapping[str, Mapping[str, Rule]] = {
    "general": {
        "name!": _matches(r"[a-z][-a-z0-9]*[a-z0-9]"),
        "version!": _natural,
        "edition!": lambda value: _natural(value) and value == 6,
        "license!": _text,
        "backends!": _list(lambda value: value in BACKENDS),
        "upstream": _list(_URL),
        "source": _URL,
        **_BOTH,
        "hub": _table({"repo-id": _text, "branch": _text}),
        "cuda": _table({**_BOTH, **_RANGE}),
        "neuron": _table(_BOTH),
        "tpu": _table(_PYTHON),
        "xpu": _table(_BOTH),
    },
    "torch": {
        **_CODE,
        **_RANGE,
        "stable-abi": _either(_VERSION, _table(dict.fromkeys(BACKENDS, _VERSION))),
    },
    "torch-noarch": {"pyext": _TEXTS, "cuda_capabilities": _TEXTS, "rocm_archs": _TEXTS},
    "tvm-ffi": _CODE,
}
FRAMEWORKS = ("torch", "torch-noarch", "tvm-ffi")


def faults(document: Mapping[str, Any]) -> list[str]:
    """Return the keys of a parsed `build.toml` that the public parser rejects."""
    tables = {key: _table(rules) for key, rules in TABLES.items()}
    found = [f"{key}: {fault}" for key in TABLES if key in document for fault in _faults(document[key], TABLES[key])]
    found += [key for key in document if key not in (*tables, "kernel")]
    found += [] if "general" in document else ["general"]
    frameworks = [name for name in FRAMEWORKS if name in document]
    found += [] if len(frameworks) == 1 else [f"frameworks: {frameworks}"]
    kernels = document.get("kernel", {})
    if not isinstance(kernels, dict):
        return [*found, "kernel"]
    for name, kernel in kernels.items():
        language = kernel.get("language") if isinstance(kernel, dict) else None
        rules = (
            KERNELS.get(language, {"a known language!": _text}) if isinstance(language, str) else {"language!": _text}
        )
        found += [f"kernel.{name}: {fault}" for fault in _faults(kernel, rules)]
        if language == "rust-cpu" and frameworks != ["tvm-ffi"]:
            found.append(f"kernel.{name}: language")
    return found
