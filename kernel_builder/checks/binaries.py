"""Checks of one shared object: its file, its architectures, and the systems that it loads on.

The reference is data: `needed_libraries.toml`, auditwheel's policies, and abi3info's table of the limited API, which
abi3audit also uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from abi3info import DATAS, FUNCTIONS
from abi3info.models import Symbol
from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.policy import WheelPolicies

from kernel_builder import backends, elf, toml_file
from kernel_builder.backends import DeviceCode
from kernel_builder.checks.findings import OLDEST_MANYLINUX, OLDEST_PYTHON, CheckedPackage, Finding, NotApplicable
from kernel_builder.config.variant import Release
from kernel_builder.demangle import demangle
from kernel_builder.elf import SharedObject
from kernel_builder.plural import listed

_NEEDED_LIBRARIES: Mapping[str, Any] = toml_file.read(Path(__file__).with_name("needed_libraries.toml"))
_REBUILD = "build the package again"
_RUNTIME_HINTS = {
    "GLIBC": "call an older function of the C library, or define this one in a source of `src`",
    "GLIBCXX": "avoid this part of the C++ library, or define it in a source of `src`",
    "CXXABI": "avoid the language feature that needs it, or define it in a source of `src`",
    "GCC": "avoid the builtin that needs it, or link libgcc statically (`-static-libgcc`)",
}
# std::terminate is left out: compilers call it in every function that is marked noexcept.
_ENDING = frozenset({"abort", "exit", "_exit", "_Exit", "quick_exit", "kill", "raise", "__assert_fail"})


def check_file(package: CheckedPackage) -> Iterator[Finding]:
    """Check that each binary is a valid shared object for the variant's platform."""
    if not package.binary_paths:
        raise NotApplicable("the package has no binary")
    platform = package.variant.platform if package.variant else None
    for path in package.binary_paths:
        try:
            binary = elf.read(path)
        except elf.Unreadable as error:
            hint = "build the package again: the file is damaged or not a binary"
            yield Finding(str(error), hint, path=path.name)
            continue
        if platform and platform.split("-")[0] != binary.machine:
            message = f"is for {binary.machine}, in a variant for {platform}"
            yield Finding(message, f"build it with a compiler for {platform}", path=path.name)
        if binary.executable_stack:
            yield Finding(
                "requests an executable stack, which hardened systems and newer glibc deny to libraries",
                'mark assembly sources with `.section .note.GNU-stack,"",@progbits`, avoid nested functions, '
                "and drop `-z execstack`",
                path=path.name,
            )
        if binary.text_relocations:
            yield Finding(
                "has text relocations, so its code pages must be writable while it is loaded",
                "compile every source and assembly file as position-independent code (`-fPIC`)",
                path=path.name,
            )


def check_run_path(package: CheckedPackage, binary: SharedObject) -> Iterator[Finding]:
    for tag, value in binary.run_paths:
        yield Finding(
            f"has the run path {value!r} ({tag}), which on another machine may contain other or hostile libraries",
            "link without -rpath: Torch's libraries are already loaded when a kernel is",
        )


def check_process_end(package: CheckedPackage, binary: SharedObject) -> Iterator[Finding]:
    """Check that a binary does not call functions that end the process of its user."""
    called = sorted({symbol.name for symbol in binary.undefined} & _ENDING)
    # The static runtimes of CUDA and Rust, which binaries for TVM FFI contain, call them.
    if called and not package.is_on_tvm_ffi:
        yield Finding(
            f"calls {listed(called)}, which can end the user's process",
            "throw an exception instead, by STD_TORCH_CHECK or TORCH_CHECK; -DNDEBUG removes assert()",
            "warning",
        )


def check_device_code(package: CheckedPackage, binary: SharedObject) -> Iterator[Finding]:
    """Check that a binary has device code for the architectures of its metadata, by which clients refuse a device."""
    if package.variant is None:
        raise NotApplicable("the variant is not known")
    backend = backends.compiled(package.variant.backend)
    expected = frozenset(package.known_metadata.archs)
    try:
        code = backend.device_code(binary.path, backends.reading(binary.path))
    except elf.Unreadable as error:
        yield Finding(str(error), _REBUILD)
        return
    if code is None:
        raise NotApplicable(f"the builder does not read device code of {backend.title}")
    if not code:
        raise NotApplicable(f"{binary.name} has no device code")
    present = frozenset(architectures(code))
    if missing := expected - present:
        yield Finding(f"has no code for {', '.join(sorted(missing))}, which its metadata lists", _REBUILD)
    if unlisted := present - expected:
        message = f"has code for {', '.join(sorted(unlisted))}, which its metadata does not list"
        yield Finding(message, _REBUILD, "warning")


def architectures(code: Iterable[DeviceCode]) -> tuple[str, ...]:
    """Return the architectures of device code as metadata lists them, ascending: `9.0a`, `12.0+PTX`."""
    parts = list(code)
    ptx = {part.arch for part in parts if part.is_ptx}
    names = sorted({part.arch for part in parts}, key=lambda arch: (arch.find("."), arch))
    return tuple(f"{name}+PTX" if name in ptx else name for name in names)


@cache
def _policies(machine: str) -> Any:
    return WheelPolicies(libc=Libc.GLIBC, arch=Architecture(machine))


def check_manylinux(package: CheckedPackage, binary: SharedObject) -> Iterator[Finding]:
    """Check that a binary needs only symbol versions of glibc and libstdc++ that the oldest supported system has."""
    if binary.machine not in ("x86_64", "aarch64"):
        raise NotApplicable(f"{binary.name} is for {binary.machine}")
    policy = _policies(binary.machine).get_policy_by_name(f"{OLDEST_MANYLINUX}_{binary.machine}")
    known: Mapping[str, frozenset[str]] = policy.symbol_versions
    for version in binary.versions:
        family, _, number = version.partition("_")  # GLIBC_2.28; policies allow families that they do not list
        if number in known.get(family, {number}):
            continue
        newest = max((n for n in known[family] if n[0].isdigit()), key=lambda n: [*map(int, n.split("."))])
        users = demangle(symbol.name for symbol in binary.undefined if symbol.version == version)
        # A version without a symbol, such as GLIBC_ABI_DT_RELR, is a requirement on the runtime as a whole.
        for text in [f"{name}@{version}" for name in users.values()] or [version]:
            message = f"needs {text}; {OLDEST_MANYLINUX} has {family} up to {newest}"
            yield Finding(message, _RUNTIME_HINTS.get(family, "build against older libraries"))


def check_python_abi(package: CheckedPackage, binary: SharedObject) -> Iterator[Finding]:
    """Check that a module uses the limited API alone, and that Python or TVM FFI finds its functions."""
    macro = f"Py_LIMITED_API=0x{OLDEST_PYTHON.major:02X}{OLDEST_PYTHON.minor:02X}0000"
    for name, since in _python_symbols(binary):
        if since is None:
            yield Finding(
                f"uses {name}, which is not part of Python's limited API",
                f"compile with {macro} and call a limited-API function, or register the op with Torch",
            )
        elif since > OLDEST_PYTHON:
            yield Finding(
                f"uses {name}, in the limited API since Python {since}; the module must load in {OLDEST_PYTHON}",
                f"compile with {macro}, which hides newer functions",
            )
    identity = package.metadata.id if package.metadata else None
    expected = f"{identity}{'.so' if package.is_on_tvm_ffi else '.abi3.so'}"
    if identity is not None and binary.name != expected:
        yield Finding(f"is not named after the `id` in metadata.json; expected {expected}", _REBUILD)
    if package.is_on_tvm_ffi:
        if not any(name.startswith("__tvm_ffi_") for name in binary.exported):
            yield Finding(
                "exports no function of TVM FFI",
                "write TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, function) into a source of [tvm-ffi] `src`: those of the "
                "global registry have one name for all versions of a kernel",
            )
        return
    expected = "PyInit_" + binary.name.partition(".")[0]
    initializers = {name for name in binary.exported if name.startswith("PyInit_")}
    if initializers != {expected}:
        yield Finding(
            f"exports {', '.join(sorted(initializers)) or 'no module initializer'}; `import` looks for {expected}",
            "put `REGISTER_EXTENSION(TORCH_EXTENSION_NAME)` into one source, and no other initializer",
        )


def oldest_python(binary: SharedObject) -> Release | None:
    """Return the first Python with all functions that a binary uses; None if some are not of the limited API."""
    releases = [since for _, since in _python_symbols(binary)]
    return max((release for release in releases if release), default=None) if all(releases) else None


def _python_symbols(binary: SharedObject) -> Iterator[tuple[str, Release | None]]:
    """Yield the symbols of Python that a binary uses, and the Python that added each to the limited API, if one did."""
    for symbol in binary.undefined:
        if symbol.version is None and symbol.name.startswith(("Py", "_Py")):
            known = FUNCTIONS.get(Symbol(symbol.name)) or DATAS.get(Symbol(symbol.name))
            yield symbol.name, Release(known.added.major, known.added.minor) if known else None


def check_dependencies(package: CheckedPackage, binary: SharedObject) -> Iterator[Finding]:
    """Check that a binary needs only libraries of its framework, of its device, and of the C++ runtime."""
    variant, table = package.variant, _NEEDED_LIBRARIES
    framework = "TVM FFI" if package.is_on_tvm_ffi else "Torch"
    release = variant.release if variant else None
    allowed = {*table["library"]["runtime"], *table["library"][framework.lower().replace(" ", "-")]}
    for backend in package.backends:
        allowed |= backend.needed_libraries(release)
    for library in binary.needed:
        if library in allowed:
            continue
        reason = f"which neither {framework} nor the C++ runtime provides"
        for backend in backends.every():
            if variant and backend.looks_like and backend.looks_like.match(library):
                reason = f"which a {variant.backend} variant does not have"
                if release and backend is variant.backend:
                    reason = f"which Torch for {backend.title} {release.major} does not depend on"
                break
        of_table = (hint for start, hint in table["hint"].items() if library.startswith(start))
        stem = library.partition(".so")[0].removeprefix("lib")
        default = f"drop -l{stem}, and compile the parts that you need through `src`"
        yield Finding(f"needs {library}, {reason}", next(of_table, default))
