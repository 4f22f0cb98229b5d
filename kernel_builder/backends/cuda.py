"""CUDA: releases and capabilities, and the libraries that Torch has loaded.

`cuda_commands.py` has the command lines of nvcc and clang, and `toolchain/` says where the compilers come from.
`cuda.toml` and `cuda_runtimes.toml` are the data.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from kernel_builder import toml_file
from kernel_builder.backends import clang_flags, cuda_commands
from kernel_builder.backends.compiled import (
    CompiledBackend,
    DeviceCommand,
    DeviceSource,
    LinkedIfCalled,
    SymbolFamily,
    Toolkit,
)
from kernel_builder.config import compiler_flags, toml_schema
from kernel_builder.config.toml_schema import Key
from kernel_builder.config.variant import Abi, FullAbi, StableAbi, TvmFfiAbi
from kernel_format.errors import ConfigError, VariantError
from kernel_format.release import Release, is_within

if TYPE_CHECKING:
    from kernel_builder.backends.host_code import CompileOptions
    from kernel_builder.config.project import Kernel, Project, TorchNoarch
    from kernel_builder.toolchain import Clang, HeaderLibrary, HostCompiler, Obstacle, Toolchains

_TABLE = Path(__file__).with_name("cuda.toml")


@dataclass(frozen=True, kw_only=True)
class CudaToolkit(Toolkit):
    """A CUDA compiler with its headers and libraries.

    Attributes:
        name: The name in commands.
        root: The directory with `bin/`, `nvvm/` and `include/`.
        release: For example 13.0. clang compiles with a newer one than that of the variants that it makes.
        version: The version of nvcc, for example `13.0.88`, or of the toolkit that clang compiles with.
        nvcc: None if clang compiles.
        include: Include directories for a host compiler; nvcc and clang know them themselves.
        lib: The directory of the CUDA runtime libraries. Wheels for clang have none.
        origin: `index` for pinned wheels, `system` for an installed toolkit.
        capabilities: The capabilities that it compiles for, ascending, such as `9.0`; no suffixed ones.
        clang: The compiler of a toolkit without nvcc.
    """

    name: str = "cuda"
    release: Release
    version: str
    nvcc: Path | None
    lib: Path
    origin: Literal["index", "system"]
    capabilities: tuple[str, ...]
    clang: Clang | None = None


# Releases and capabilities.


@dataclass(frozen=True)
class ClangReleases:
    """The releases of the wheels that clang and its CUDA are taken from.

    Attributes:
        ziglang: The wheel that has the program.
        headers: The wheel that has its headers.
        cuda: The CUDA release that it compiles with.
        fatbinary: The CUDA release whose `fatbinary` it runs.
    """

    ziglang: Release
    headers: Release
    cuda: Release
    fatbinary: Release


@cache
def clang_releases() -> ClangReleases:
    """Return what clang is made of."""
    return ClangReleases(**{name: Release.parse(release) for name, release in CUDA.data["clang"].items()})


@cache
def known_capabilities() -> Mapping[Release, tuple[str, ...]]:
    """Return CUDA release -> the capabilities that its compiler knows, without suffixes and `+PTX`, ascending."""
    rows = CUDA.data["release"].items()
    return dict(sorted((Release.parse(release), tuple(entry["capabilities"])) for release, entry in rows))


def releases() -> tuple[Release, ...]:
    """Return every CUDA release of the matrix, ascending."""
    return tuple(known_capabilities())


def _capability_key(capability: str) -> tuple[int, int, str]:
    match = re.match(r"(\d+)\.(\d+)(.*)", capability)
    assert match, capability
    return int(match[1]), int(match[2]), match[3]


def _number(capability: str) -> str:
    return re.sub(r"[af]?(\+PTX)?$", "", capability)


def _runs_on(entry: str, capability: str) -> bool:
    """Return whether a GPU of a capability runs the code for an entry of `cuda-capabilities`."""
    (major, minor, suffix), (of_gpu, minor_of_gpu, _) = _capability_key(entry), _capability_key(capability)
    if suffix.startswith("a"):
        return (major, minor) == (of_gpu, minor_of_gpu)
    if suffix == "+PTX":
        return (major, minor) <= (of_gpu, minor_of_gpu)
    return major == of_gpu and minor <= minor_of_gpu


def _tegra(platform: str) -> frozenset[str]:
    """Return the capabilities that no machine of a platform has."""
    tegra = CUDA.data["tegra"]
    return frozenset() if platform in tegra["platforms"] else frozenset(tegra["capabilities"])


def capabilities(kernel: Kernel, cuda: Release, platform: str) -> tuple[str, ...]:
    """Return the capabilities to compile a kernel for, ascending.

    These are the entries of the kernel's list that the compiler knows and the platform has. A kernel without a list
    gets all such capabilities, and PTX of the newest. `Kernel.only_capabilities` selects among these. For a CUDA
    release that is not in the matrix, the newest release of the matrix below it stands in, or else the oldest.

    Raises:
        VariantError: If no entry of the kernel's list is left.
    """
    of_release = known_capabilities()
    at_or_below = [release for release in of_release if release <= cuda]
    known = set(of_release[max(at_or_below) if at_or_below else min(of_release)]) - _tegra(platform)
    if kernel.cuda_capabilities is None:
        newest = max(known, key=_capability_key)
        every = tuple(f"{c}+PTX" if c == newest else c for c in sorted(known, key=_capability_key))
        return _nearest(every, kernel.only_capabilities)
    wanted = {c for c in kernel.cuda_capabilities if _number(c) in known}
    if not wanted:
        raise _none_left(kernel, kernel.cuda_capabilities, cuda, platform)
    return _nearest(tuple(sorted(wanted, key=_capability_key)), kernel.only_capabilities)


def _none_left(kernel: Kernel, listed: Sequence[str], cuda: Release, platform: str) -> VariantError:
    elsewhere = [c for c in listed if _number(c) in _tegra(platform)]
    unknown = [c for c in listed if c not in elsewhere]
    reasons = [f"CUDA {cuda} does not compile for {', '.join(unknown)}"] if unknown else []
    reasons += [f"no {platform} machine has {', '.join(elsewhere)}"] if elsewhere else []
    hint = "add a capability"
    numbers = {_number(c) for c in unknown}
    if knowing := [release for release, of_release in known_capabilities().items() if numbers & set(of_release)]:
        bound = f'minver = "{min(knowing)}"' if min(knowing) > cuda else f'maxver = "{max(knowing)}"'
        hint += f", or leave this CUDA release out by [general.cuda] {bound}"
    return VariantError(
        f"no capability is left: {', and '.join(reasons)}",
        where=f"build.toml: [kernel.{kernel.name}] cuda-capabilities",
        hint=hint,
    )


def _nearest(ascending: tuple[str, ...], only: Sequence[str]) -> tuple[str, ...]:
    """Return the entries for the capabilities in `only`, each with its suffix; all if `only` is empty.

    A capability without an entry of its number gets the nearest entry below it, whose code a GPU of that capability may
    run, or else the lowest: the link needs the symbols of every kernel.
    """
    if not only:
        return ascending
    numbers = [_capability_key(entry)[:2] for entry in ascending]
    chosen = set()
    for number in (_capability_key(capability)[:2] for capability in only):
        chosen.add(max((n for n in numbers if n <= number), default=numbers[0]))
    return tuple(entry for entry, number in zip(ascending, numbers, strict=True) if number in chosen)


# What a project may write.

# What nvcc's shell does not leave as it is, in names of sources and of directories with headers.
_OF_THE_SHELL = {"src": r'[,"$`\\]', "include": r"""[,"'$`\\]"""}
# Of a source, in bytes. nvcc adds `.compute_100a.cudafe1.stub.c` and the like to it.
_LONGEST_NAME = 220


@cache
def nvcc_options() -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Return the forms of the flags for nvcc that a project may have, and why it may not have others, by name."""
    data = toml_file.read(_TABLE.with_name("nvcc_options.toml"))
    plain, valued = ("|".join(map(re.escape, data["allowed"][kind])) for kind in ("plain", "valued"))
    forms = (
        *compiler_flags.HOST,
        rf"--?({plain})|--?({valued})(=[\w,.-]+)?|--?t=?\d+",
        r"--?(Wno-[\w-]+|expt-[\w-]+|extra-[\w-]+(=[\w,-]*)?|(diag|display)[-_][\w-]+(=[\w,-]+)?)",
        r"--?(gpu-architecture|gpu-code|generate-code|gencode|arch|code)=?[\w,=\[\]\"]*",
    )
    return forms, {option: reason for reason, names in data["refused"].items() for option in names}


# Libraries and symbols.

_LINK_TORCH = "link with libtorch_cuda.so, which loads the CUDA libraries that Torch uses"
_HINTS = {"cuda": "get the function with cudaGetDriverEntryPoint, or "}
_OF_RUNTIME = re.compile(r"(?:__)?cuda[A-Z]")


@cache
def _families(framework: Abi | None) -> tuple[SymbolFamily, ...]:
    libraries: Mapping[str, Mapping[str, Any]] = CUDA.data["library"]
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
                _LINK_TORCH if loaded else f"{_HINTS.get(stem, '')}open lib{stem}.so with dlopen when it is called",
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
    only uses what the runtimes of CUDA 12 and 13 both export works with every Torch of both.
    """
    data = toml_file.read(_TABLE.with_name("cuda_runtimes.toml"))
    every = frozenset(data["every"])
    return {Release.parse(release): every | frozenset(own) for release, own in data["release"].items()}


def runtimes_lacking(name: str, releases: Iterable[Release]) -> tuple[Release, ...]:
    """Return those of the releases whose runtime does not have a function; none for a name of another library."""
    if not _OF_RUNTIME.match(name):
        return ()
    return tuple(release for release in releases if name not in runtime_exports()[release])


class _Cuda(CompiledBackend):
    def allowed(self, project: Project, releases: Sequence[Release | None]) -> list[Release | None]:
        """Return the releases that `[general.cuda]` allows and at least one kernel can be compiled with."""
        floors = [kernel.cuda_minver for kernel in project.kernels if kernel.backend is self]
        needed = min((floor for floor in floors if floor), default=None) if all(floors) else None
        settings = project.backend_settings.get(self, {})
        low = max((floor for floor in (needed, settings.get("minver")) if floor), default=None)
        return [release for release in releases if release and is_within(release, low, settings.get("maxver"))]

    def forbids(self, release: Release | None) -> str:
        return f"[general.cuda] minver and maxver or a kernel's cuda-minver rule out CUDA {release}"

    def representative(self, releases: Sequence[Release | None]) -> list[Release | None]:
        """Return the oldest of each major: every later minor release can load its binaries."""
        oldest: dict[int, Release | None] = {}
        for release in sorted(filter(None, releases)):
            oldest.setdefault(release.major, release)
        return list(oldest.values())

    def can_load(self, built: Release | None, release: Release | None) -> bool:
        return built is None or (release is not None and release.major == built.major and release >= built)

    def runs_with(self, release: Release) -> str:
        return f"{release} and later {release.major}.x"

    def serves(self, kernel: Kernel, release: Release | None) -> bool:
        return not (release and kernel.cuda_minver and release < kernel.cuda_minver)

    def notes(self, kernel: Kernel) -> Iterator[str]:
        known = self.known_archs()
        unknown = [c for c in kernel.cuda_capabilities or () if _number(c) not in known]
        if unknown:
            yield (
                f"[kernel.{kernel.name}] cuda-capabilities: no known CUDA release compiles for {', '.join(unknown)}; "
                f"{'it is' if len(unknown) == 1 else 'they are'} skipped"
            )
        listed = kernel.cuda_capabilities or ()
        for capability in kernel.only_capabilities if listed else ():
            if not any(_runs_on(entry, capability) for entry in listed):
                yield (
                    f"[kernel.{kernel.name}] cuda-capabilities: no code for {', '.join(listed)} runs "
                    f"on a GPU of capability {capability}"
                )

    def limited(self, kernel: Kernel, only: tuple[str, ...]) -> Kernel:
        if kernel.cuda_capabilities and {_number(c) for c in kernel.cuda_capabilities} <= set(only):
            return kernel
        return super().limited(kernel, only)

    def known_archs(self) -> list[str]:
        return sorted({c for known in known_capabilities().values() for c in known}, key=_capability_key)

    def noarch_archs(self, framework: TorchNoarch) -> tuple[str, ...] | None:
        return framework.cuda_capabilities

    def archs(self, kernels: Sequence[Kernel], release: Release | None, platform: str) -> tuple[str, ...]:
        assert release
        every = {c for kernel in kernels for c in capabilities(kernel, release, platform)}
        return tuple(sorted(every, key=_capability_key))

    def obstacle(self, toolchains: Toolchains, release: Release | None) -> Obstacle | None:
        assert release
        return toolchains.cuda_obstacle(release)

    def obstacle_without_torch(self, toolchains: Toolchains, release: Release | None) -> Obstacle | None:
        assert release
        return toolchains.static_cuda_obstacle(release)

    def toolkit(self, toolchains: Toolchains, release: Release | None) -> CudaToolkit:
        assert release
        return toolchains.cuda(release)

    def toolkit_libraries(self, toolchains: Toolchains, toolkit: Toolkit) -> HeaderLibrary | None:
        return toolchains.cuda_libraries(_own(toolkit))

    def provenance(self, toolkit: Toolkit | None) -> dict[str, str]:
        """Return clang's version. nvcc's release is in the variant's name."""
        clang = _own(toolkit).clang if toolkit else None
        return {"cuda-compiler": f"clang {clang.version}, CUDA {_own(toolkit).version}"} if clang else {}

    def shell(self, toolkit: Toolkit, host: HostCompiler) -> tuple[list[Path], dict[str, str]]:
        cuda = _own(toolkit)
        path = [cuda.root / "bin", *([cuda.clang.root] if cuda.clang else [])]
        variables = {"CUDA_PATH": str(cuda.root)}
        if cuda.nvcc:  # the builder expects one in CUDA_HOME
            variables |= {"CUDA_HOME": str(cuda.root), "NVCC_CCBIN": str(host.path)}
        return path, variables

    def check_flags(self, project: Path, table: str, kernel: Kernel) -> None:
        allowed, refused = nvcc_options()
        compiler_flags.check(project, table, "cuda-flags", kernel.cuda_flags, allowed, by_shell="nvcc", refused=refused)

    def check_source(self, project: Path, table: str, kernel: Kernel, source: str) -> None:
        where = f"{project / 'build.toml'}: [{table}]"
        if len(os.fsencode(PurePosixPath(source).name)) > _LONGEST_NAME:
            raise ConfigError(
                f"nvcc cannot compile {source}: names of its intermediate files would be longer than 255 bytes",
                where=f"{where} src",
                hint=f"rename the file, to at most {_LONGEST_NAME} bytes",
            )
        for key, name in [("src", source), *(("include", entry) for entry in kernel.include)]:
            if re.search(_OF_THE_SHELL[key], name):
                raise ConfigError(
                    f"nvcc cannot compile {source} with {name!r}: it splits names at commas and passes the rest to a "
                    "shell",
                    where=f"{where} {key}",
                    hint="rename the file or directory: letters, digits, dots, dashes and underscores are safe",
                )

    def device_roots(self, toolkit: Toolkit | None) -> dict[str, Path]:
        clang = _own(toolkit).clang
        return {cuda_commands.CLANG: clang.root} if clang else {}

    def device_command(
        self, source: DeviceSource, host: HostCompiler, toolkit: Toolkit | None, options: CompileOptions
    ) -> DeviceCommand:
        cuda, kernel = _own(toolkit), source.kernel
        archs = capabilities(kernel, cuda.release, source.platform)
        if cuda.clang is None:
            return cuda_commands.by_nvcc(host, cuda, options, archs, kernel.cuda_flags)
        flags = clang_flags.of_clang(kernel.cuda_flags, f"{source.where} cuda-flags")
        return cuda_commands.by_clang(host, options, archs, flags, source.platform)

    def torch_libraries(self, *, stable: bool) -> tuple[str, ...]:
        return ("libtorch_cuda.so",) if stable else ("libc10_cuda.so", "libtorch_cuda.so")

    def static_runtime(self, toolkit: Toolkit | None) -> Path:
        return _own(toolkit).lib / "libcudart_static.a"

    def needed_libraries(self, release: Release | None) -> frozenset[str]:
        names = {"libtorch_cuda.so", "libc10_cuda.so"}
        for stem, entry in self.data["library"].items():
            version = entry.get("soname", {})
            every = (
                [version]
                if isinstance(version, str)
                else [of for major, of in version.items() if release is None or int(major) == release.major]
            )
            names |= {f"lib{stem}.so.{of}" for of in every}
        return frozenset(names)

    def library_hint(self, library: str) -> str | None:
        if library.startswith("libcudart"):
            return "leave the CUDA runtime's symbols undefined: they resolve through libtorch_cuda.so"
        return None

    def symbol_families(self, framework: Abi | None) -> tuple[SymbolFamily, ...]:
        return _families(framework)

    def lacking(self, symbol: str, release: Release) -> str | None:
        """Return which runtimes lack a function that clients load a variant with: of its major, and no older minor."""
        loading = [known for known in runtime_exports() if known.major == release.major and known >= release]
        lacking = " and ".join(map(str, runtimes_lacking(symbol, loading)))
        return f"is not in the runtime of CUDA {lacking}, which loads this variant too" if lacking else None

    def current_archs(self) -> tuple[str, ...]:
        import torch

        if not torch.cuda.is_available():
            return ()
        return (".".join(map(str, torch.cuda.get_device_capability())),)

    def is_present(self) -> bool:
        return shutil.which("nvidia-smi") is not None


def _own(toolkit: Toolkit | None) -> CudaToolkit:
    assert isinstance(toolkit, CudaToolkit)
    return toolkit


_capability = toml_schema.matching(
    r"[0-9]+\.[0-9][af]?(?:\+PTX)?",
    'a CUDA capability like "9.0"; a suffix `a` or `f` (as in "9.0a") and `+PTX` may follow',
)
_capabilities = Key(toml_schema.list_of(_capability, least=1, hint="leave the key out to compile for every capability"))

CUDA = _Cuda(
    name="cuda",
    title="CUDA",
    prefix="cu",
    suffixes=frozenset({".cu"}),
    kernel_keys={
        "cuda-capabilities": _capabilities,
        "cuda-flags": Key(toml_schema.list_of(toml_schema.text)),
        "cuda-minver": Key(toml_schema.version),
    },
    noarch_keys={"cuda_capabilities": _capabilities},
    general_keys={"minver": Key(toml_schema.version), "maxver": Key(toml_schema.version)},
    python_depends=("nvidia-cutlass-dsl",),
    kernel_depends=True,
    table=_TABLE,
    preference=3,
    defines=("-DUSE_CUDA",),
    # Headers of CUDA's libraries, and those of Torch and CUTLASS that include one of them, directly or not. In Torch
    # 2.15, 77 of 9,572 headers do. The pattern covers them and 186 more; it leaves out the 13 that also need NCCL.
    library_headers=re.compile(
        r"(cublas|cudalibxt|cuda_profiler|cudaProfiler|cudnn|cufft|curand|cusolver|cusparse)\w*\.h"
        r"|(nvblas|nvml|nvrtc)\.h|nvtx3/.*|c10/cuda/driver_api\.h|(ATen|torch)/(.*/)?(cuda|cudnn).*|cutlass/util/.*"
    ),
    # Torch does not load the driver in a way that others see, and a binary that only named it would not load on a
    # machine without a driver.
    linked_if_called=(LinkedIfCalled("libcuda.so.1", symbols=" cu[A-Z]", but_not=" cuFile"),),
    has_archs=True,
    dispatch_key="CUDA",
    torch_version="cuda",
    warp_sizes=(32,),
    torch_part=SymbolFamily(
        "Torch's CUDA part",
        re.compile(r"_Z(?:T[ISV])?N[KVrRO]*(?:2at|3c10)4cuda"),
        re.compile(r"lib(?:torch|c10)_cuda\.so"),
        _LINK_TORCH,
    ),
    looks_like=re.compile(r"lib(?:cu[a-z]|nv[a-zA-Z]|nccl|torch_cuda|c10_cuda)"),
)
