"""Check that a binary needs only libraries that its users have: its framework's, its device's and the C++ runtime.

`needed_libraries.toml` lists them, apart from those of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.checks.findings import CheckedPackage, Finding

NAME = "dependencies"


@cache
def _table() -> Mapping[str, Any]:
    return toml_file.read(Path(__file__).with_name("needed_libraries.toml"))


def check_dependencies(package: CheckedPackage) -> Iterator[Finding]:
    allowed = _allowed(package)
    for binary in package.binaries:
        for library in binary.needed:
            if library not in allowed:
                yield Finding(
                    NAME, binary.name, f"needs {library}, {_reason(package, library)}", _hint(package, library)
                )


def _allowed(package: CheckedPackage) -> frozenset[str]:
    release = package.variant.release if package.variant else None
    library = _table()["library"]
    framework = library["tvm-ffi" if package.is_on_tvm_ffi else "torch"]
    return frozenset(library["runtime"]).union(
        framework, *(backend.needed_libraries(release) for backend in package.backends)
    )


def _reason(package: CheckedPackage, library: str) -> str:
    variant = package.variant
    for backend in package.known_backends:
        if variant and backend.looks_like and backend.looks_like.match(library):
            if variant.release and backend is variant.backend:
                return f"which Torch for {backend.title} {variant.release.major} does not depend on"
            return f"which a {variant.backend} variant does not have"
    return f"which neither {'TVM FFI' if package.is_on_tvm_ffi else 'Torch'} nor the C++ runtime provides"


def _hint(package: CheckedPackage, library: str) -> str:
    of_table: Iterator[str | None] = (hint for start, hint in _table()["hint"].items() if library.startswith(start))
    of_backends = (backend.library_hint(library) for backend in package.known_backends)
    if hint := next(filter(None, chain(of_table, of_backends)), None):
        return hint
    stem = library.partition(".so")[0].removeprefix("lib")
    return f"drop -l{stem}, and compile the parts that you need through `src`"
