"""Check that a module uses only Python's limited API, and that Python finds its initialiser, or TVM FFI its functions.

The limited API's names and the releases that introduced them are abi3info's data, which abi3audit also uses.
"""

from __future__ import annotations

from collections.abc import Iterator

from abi3info import DATAS, FUNCTIONS
from abi3info.models import Symbol

from kernel_builder.checks.findings import CheckedPackage, Finding
from kernel_builder.config.variant import Release
from kernel_builder.elf import SharedObject

NAME = "python-abi"
# Of names by which TVM FFI looks for the functions of a library.
_FUNCTION = "__tvm_ffi_"


def check_python_abi(package: CheckedPackage) -> Iterator[Finding]:
    for binary in package.binaries:
        yield from _symbols(binary, package.policy.python)
        on_tvm_ffi = package.is_on_tvm_ffi
        yield from _name(binary, package.metadata.id if package.metadata else None, ".so" if on_tvm_ffi else ".abi3.so")
        yield from _functions(binary) if on_tvm_ffi else _initialiser(binary)


def oldest_python(binary: SharedObject) -> Release | None:
    """Return the first Python with all functions that a binary uses; None if some are not of the limited API."""
    releases = [since for _, since in _added(binary)]
    return max((release for release in releases if release), default=None) if all(releases) else None


def _added(binary: SharedObject) -> Iterator[tuple[str, Release | None]]:
    """Yield the symbols of Python that a binary uses, and the Python that added each to the limited API, if one did."""
    for symbol in binary.undefined:
        if symbol.version is None and symbol.name.startswith(("Py", "_Py")):
            known = FUNCTIONS.get(Symbol(symbol.name)) or DATAS.get(Symbol(symbol.name))
            yield symbol.name, Release(known.added.major, known.added.minor) if known else None


def _symbols(binary: SharedObject, oldest: Release) -> Iterator[Finding]:
    for name, since in _added(binary):
        if since is None:
            yield Finding(
                NAME,
                binary.name,
                f"uses {name}, which is not part of Python's limited API",
                f"compile with {_macro(oldest)} and call a limited-API function, or register the op with Torch",
            )
        elif since > oldest:
            yield Finding(
                NAME,
                binary.name,
                f"uses {name}, in the limited API since Python {since}; the module must load in {oldest}",
                f"compile with {_macro(oldest)}, which hides newer functions",
            )


def _macro(oldest: Release) -> str:
    return f"Py_LIMITED_API=0x{oldest.major:02X}{oldest.minor:02X}0000"


def _name(binary: SharedObject, identity: str | None, suffix: str) -> Iterator[Finding]:
    if identity is not None and binary.name != identity + suffix:
        yield Finding(
            NAME,
            binary.name,
            f"is not named after the `id` in metadata.json; expected {identity}{suffix}",
            "build the package again",
        )


def _functions(binary: SharedObject) -> Iterator[Finding]:
    if not any(name.startswith(_FUNCTION) for name in binary.exported):
        yield Finding(
            NAME,
            binary.name,
            "exports no function of TVM FFI",
            "write TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, function) into a source of [tvm-ffi] `src`: those of the global "
            "registry have one name for all versions of a kernel",
        )


def _initialiser(binary: SharedObject) -> Iterator[Finding]:
    expected = "PyInit_" + binary.name.partition(".")[0]
    initialisers = {name for name in binary.exported if name.startswith("PyInit_")}
    if initialisers != {expected}:
        yield Finding(
            NAME,
            binary.name,
            f"exports {', '.join(sorted(initialisers)) or 'no module initialiser'}; `import` looks for {expected}",
            "put `REGISTER_EXTENSION(TORCH_EXTENSION_NAME)` into one source, and no other initialiser",
        )
