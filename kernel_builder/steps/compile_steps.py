"""The compile steps of one variant: which sources, with which headers, flags and files."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from kernel_builder import backends
from kernel_builder.backends import CompiledBackend, DeviceCommand
from kernel_builder.backends.host_code import (
    CXX_SUFFIXES,
    GXX,
    CompileOptions,
    gxx,
    system_includes,
    token,
    without_programs,
)
from kernel_builder.backends.tools import HeaderLibrary, HostCompiler, Toolkit
from kernel_builder.config import compiler_flags, kernel_sources, matrix
from kernel_builder.config.project import (
    Backend,
    CompiledFramework,
    Kernel,
    Project,
    TorchFramework,
    TorchNoarch,
    TvmFfi,
)
from kernel_builder.config.variant import Abi, Noarch, Release, TvmFfiAbi, Variant, this_platform
from kernel_builder.steps import crates, include_scan
from kernel_builder.steps.files_read import foreign
from kernel_builder.steps.graph import PYTHON, RECIPE, CompileStep, digest
from kernel_builder.toolchain import Toolchains, components
from kernel_format.errors import ConfigError, ToolchainError


@dataclass(frozen=True)
class _Tools:
    """The toolchain of one variant. The functions fetch headers, so they are called only for sources that need them."""

    backend: CompiledBackend
    host: HostCompiler
    toolkit: Toolkit | None
    torch: Callable[[], HeaderLibrary] | None  # none for a project on TVM FFI
    standard: int  # the C++ standard that Torch's headers need
    toolkit_libraries: Callable[[], HeaderLibrary | None]
    dependency: Callable[[str], HeaderLibrary]
    tvm_ffi: HeaderLibrary | None  # the headers of TVM FFI, which all sources of such a project see


# The public builder searches this directory of a project for headers, after those in `include`.
_DEFAULT_INCLUDE = "csrc"
# Where the public builder writes the header into a project. Some sources include it by this path.
_REGISTRATION = "torch-ext/registration.h"

# Draft names of C++ standards -> year.
_STANDARDS = {"98": "03", "0x": "11", "1y": "14", "1z": "17", "2a": "20", "2b": "23", "2c": "26"}


def drafts(project: Project, variant: Variant, toolchains: Toolchains) -> tuple[CompileStep, ...]:
    """Return the compile steps of a variant's binary in link order, before its op namespace is known.

    `with_namespace` completes the steps with `uses_namespace`.
    """
    framework, abi = project.framework, variant.framework
    assert not isinstance(framework, TorchNoarch)
    assert not isinstance(abi, Noarch)
    stable = variant.stable_abi(framework)
    release = stable or abi.release
    backend = backends.compiled(variant.backend)
    toolkit = backend.toolkit(toolchains, variant.release)
    tvm_ffi = None
    if isinstance(abi, TvmFfiAbi):
        headers = toolchains.component(components.tvm_ffi_headers(abi))
        tvm_ffi = HeaderLibrary("tvm-ffi", headers.root, (headers.root / "include",), headers.identity)
    tools = _Tools(
        backend,
        toolchains.host(variant.platform),
        toolkit,
        None if tvm_ffi else cache(lambda: toolchains.torch(release, "stable" if stable else "full", variant.platform)),
        matrix.load().cxx.get(release, 17),
        cache(lambda: backend.toolkit_libraries(toolchains, toolkit) if toolkit else None),
        cache(toolchains.dependency),
        tvm_ffi,
    )
    defines = _defines(backend, stable)
    steps: list[CompileStep] = []
    kernels = kernel_sources.of_backend(project, variant.backend, variant.release)
    # As in the public builder, every source sees the libraries of all kernels; [torch] cannot name libraries.
    every = sorted({name for kernel in kernels for name in kernel.depends})
    compiled = [kernel for kernel in kernels if not kernel.cargo_manifest]
    for kernel in kernel_sources.disjoint([_binding(framework, variant.backend), *compiled]):
        part = replace(kernel, depends=tuple(dict.fromkeys((*kernel.depends, *every))))
        _check(project, part, backend)
        for source in part.src:
            if not kernel_sources.is_header(source):
                steps.append(_draft(project, part, source, variant, tools, defines))
    rust = (kernel for kernel in kernels if kernel.cargo_manifest)
    return (*steps, *(crates.step(project, kernel, tools.host, variant.target) for kernel in rust))


def check(project: Project) -> None:
    """Raise a ConfigError for a flag or a source of a project that no build accepts."""
    if not isinstance(project.framework, TorchNoarch):
        for backend in project.backends:
            if isinstance(backend, CompiledBackend):
                kernels = (kernel for kernel in project.kernels if kernel.backend is backend)
                for kernel in (_binding(project.framework, backend), *kernels):
                    if kernel.cargo_manifest:
                        crates.files(project, kernel)
                    else:
                        _check(project, kernel, backend)


def _check(project: Project, kernel: Kernel, backend: CompiledBackend) -> None:
    compiler_flags.check(project.root, _table(kernel), "cxx-flags", kernel.cxx_flags)
    backend.check_flags(project.root, _table(kernel), kernel)
    for source in kernel.src:
        if not kernel_sources.is_header(source):
            _check_source(project, kernel, source, backend)


def _binding(framework: CompiledFramework, backend: Backend) -> Kernel:
    """Return the sources of `[torch]` or `[tvm-ffi]` as a kernel of a backend."""
    return Kernel(
        name=framework.table,
        backend=backend,
        depends=("torch",),
        src=framework.src,
        include=framework.include,
        cxx_flags=framework.cxx_flags,
    )


def with_namespace(draft: CompileStep, module: str, framework: Abi) -> CompileStep:
    """Return a step with the op namespace in its command if its files mention it."""
    if not draft.uses_namespace:
        return draft
    macro = "TVM_FFI_EXTENSION_NAME" if isinstance(framework, TvmFfiAbi) else "TORCH_EXTENSION_NAME"
    argv = (*draft.argv, f"-D{macro}={module}")
    return replace(draft, argv=argv, key=digest("namespace", draft.key, module))


def _defines(backend: CompiledBackend, stable: Release | None) -> tuple[str, ...]:
    defines = [f"-D{backend.name.upper()}_KERNEL", "-DPy_LIMITED_API=0x03090000"]
    if stable:
        defines.append(f"-DTORCH_TARGET_VERSION=0x{(stable.major << 56) | (stable.minor << 48):016x}")
    return (*defines, *backend.defines)


def _table(kernel: Kernel) -> str:
    """Return the table of `build.toml` that declares a kernel's sources."""
    return kernel.name if kernel.name in (TorchFramework.table, TvmFfi.table) else f"kernel.{kernel.name}"


def _check_source(project: Project, kernel: Kernel, source: str, backend: CompiledBackend) -> None:
    where = f"{project.root / 'build.toml'}: [{_table(kernel)}] src"
    suffix = PurePosixPath(source).suffix
    if suffix in backend.suffixes:
        backend.check_source(project.root, _table(kernel), kernel, source)
        return
    if owner := next((other for other in backends.every() if suffix in other.suffixes), None):
        raise ConfigError(
            f"{source} is a {owner.title} source, which the {backend.name} backend cannot compile",
            where=where,
            hint=f'move it to a [kernel.*] table with language = "cpp-{owner.name}"',
        )
    if suffix not in CXX_SUFFIXES:
        known = sorted({suffix for other in backends.every() for suffix in other.suffixes})
        raise ConfigError(
            f"{source} is neither a header nor a source that the {backend.name} backend can compile",
            where=where,
            hint=f"sources end in {', '.join(known)}, .cpp, .cc or .cxx; headers in .h, .hpp, .cuh or .inl",
        )


def _draft(
    project: Project, kernel: Kernel, source: str, variant: Variant, tools: _Tools, defines: tuple[str, ...]
) -> CompileStep:
    header = _registration_header()
    provided = {"registration.h": header}
    searched = (*kernel.include, _DEFAULT_INCLUDE)
    library_headers = tools.backend.library_headers
    scanned = include_scan.scan(project.root, source, searched, kernel.src, provided, library_headers)
    generated = {"builder/registration.h": header}
    if _REGISTRATION not in dict(scanned.files):
        generated[f"src/{_REGISTRATION}"] = header
    includes = _own_includes(kernel, scanned)
    identities = [tools.host.identity]  # of the compilers and headers, for the step's key
    roots: dict[str, Path] = {}  # placeholder in commands -> directory
    of_toolchains: list[Path] = []  # the toolchains' directories of headers
    readable = tools.host.headers
    torch = tools.torch() if scanned.torch and tools.torch else None
    of_toolkit = tools.toolkit_libraries() if scanned.toolkit_libraries else None
    libraries = (tools.dependency(name) for name in kernel.depends if name != "torch")
    for library in filter(None, [torch, tools.tvm_ffi, *libraries, of_toolkit]):
        place = token(library.name)
        identities.append(library.identity)
        roots[place] = library.root
        includes += system_includes(place, library.root, library.include)
        of_toolchains += library.include
    if torch:
        kernel = _without_older_standards(kernel, tools.standard)
    if scanned.python:
        identities.append(sys.version)
        python = roots[PYTHON] = _python_include(project, source, tools.host.platform)
        includes += ["-isystem", PYTHON]
        # Debian has pyconfig.h in a directory of the architecture.
        configuration = f"{re.escape(str(python.parent))}/[^/]+/{re.escape(python.name)}/pyconfig[.]h"
        readable = (*readable, configuration)
    if tools.toolkit:
        identities.append(tools.toolkit.identity)
        roots[token(tools.toolkit.name)] = tools.toolkit.root
        of_toolchains += tools.toolkit.include
    _check_asked(project.root / source, scanned.asked, of_toolchains, tools.host)
    # nvcc splits the options that carry it at commas and white space.
    alias = re.sub(r"[^\w./-]", lambda match: f"%{ord(match[0]):02x}", f"/{project.name}/{kernel.name}/{source}")
    is_for_device = PurePosixPath(source).suffix in tools.backend.suffixes
    if is_for_device:
        roots.update(tools.backend.device_roots(tools.toolkit))
    options = CompileOptions(
        project=project.root,
        kernel=kernel,
        where=f"{project.root / 'build.toml'}: [{_table(kernel)}]",
        source=source,
        files=tuple(name for name, _ in scanned.files),
        alias=alias,
        standard=tools.standard if torch else 17,
        defines=defines,
        includes=tuple(includes),
        roots=roots,
    )
    if is_for_device:
        command = tools.backend.device_command(tools.host, tools.toolkit, options)
        generated.update(command.generated)
    else:
        command = DeviceCommand(gxx(tools.host, tools.toolkit, options), GXX, {})
    portable = without_programs(command.argv, tools.host)
    return CompileStep(
        key=digest("compile", RECIPE, portable, identities, scanned.files, generated),
        project=project.root,
        source=source,
        compiler=command.compiler,
        argv=command.argv,
        roots=roots,
        files=scanned.files,
        generated=generated,
        headers=readable,
        uses_namespace=scanned.namespace,
        title=f"{project.name}/{source} ({variant.target})",
    )


def _check_asked(source: Path, asked: Sequence[str], toolchains: Sequence[Path], host: HostCompiler) -> None:
    """Raise a ConfigError for a header of `__has_include` that this machine has, and other machines may lack.

    Compilers do not list these headers, so a cached object would keep the answer of another machine or day.
    """
    for name in asked:
        paths = (os.path.join(directory, name) for directory in [*map(str, toolchains), *host.c_include])  # noqa: PTH118
        leads_out = os.path.normpath(name).startswith("../../")  # of `builder`, which is searched as well
        found = name if leads_out else os.path.normpath(next(filter(os.path.isfile, paths), "/"))
        known = (*host.headers, *(f"{re.escape(str(directory))}/.*" for directory in toolchains))
        if found != "/" and foreign([found], known):
            raise ConfigError(
                f"tests with __has_include for {found}, which neither the project nor a toolchain of this variant has",
                where=str(source),
                hint="define a macro in `cxx-flags` instead; other machines have another header, or none",
            )


def _own_includes(kernel: Kernel, scanned: include_scan.Scan) -> list[str]:
    """Return the options for the project's directories of headers, and for the builder's own header."""
    has_default = any(name.startswith(f"{_DEFAULT_INCLUDE}/") for name, _ in scanned.files)
    searched = (*kernel.include, _DEFAULT_INCLUDE) if has_default else kernel.include
    return [*(f"-Isrc/{entry}" if entry != "." else "-Isrc" for entry in searched), "-Ibuilder"]


def _without_older_standards(kernel: Kernel, standard: int) -> Kernel:
    """Return a kernel without flags like `-std=c++17` where Torch's headers need a newer C++ standard.

    The compilers take the last such flag, which is the project's. Newer releases of Torch need newer standards.
    """

    def newer(option: tuple[str, ...]) -> bool:
        match = re.fullmatch(r"--?std=(?:c|gnu)\+\+(\d[\dabcxyz])", "=".join(option))
        return not match or int(_STANDARDS.get(match[1], match[1])) >= standard

    def without_older(flags: Sequence[str]) -> tuple[str, ...]:
        return tuple(word for option in filter(newer, compiler_flags.options(flags)) for word in option)

    every: dict[str, Any] = {key: without_older(getattr(kernel, key)) for key in kernel_sources.FLAGS}
    return replace(kernel, **every)


@cache
def _registration_header() -> str:
    """Return registration.h for Linux. Its code for macOS is not part of any key or op namespace."""
    text = (Path(__file__).parents[1] / "templates" / "registration.h").read_text()
    return re.sub(r"#ifdef __APPLE__.*?#else\n(.*?)#endif\n", r"\1", text, flags=re.DOTALL)


def _python_include(project: Project, source: str, platform: str) -> Path:
    directory = Path(sysconfig.get_path("include"))
    if platform != this_platform() or not (directory / "Python.h").is_file():
        raise ToolchainError(
            f"the source includes Python.h, which this machine does not have for {platform}",
            where=str(project.root / source),
            hint="remove the include, which registration.h and the stable ABI do not need, or build on a machine for "
            f"{platform} with Python's headers (Debian: apt-get install python3-dev)",
        )
    return directory
