"""CUDA as a back end. `releases` has capabilities, `toolkits` the compilers, `commands` their command lines.

`cuda.toml`, `cuda_runtimes.toml` and `nvcc_options.toml` are the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.backends import CompiledBackend, DeviceCode, DeviceCommand, LinkedIfCalled, ReadAt, SymbolFamily
from kernel_builder.backends.cuda import commands, fatbin, toolkits
from kernel_builder.backends.cuda.releases import DATA, KNOWN_CAPABILITIES, TABLE, capabilities, capability_key, runs_on
from kernel_builder.backends.cuda.toolkits import CudaToolkit, as_cuda
from kernel_builder.backends.host_code import CompileOptions
from kernel_builder.backends.tools import HeaderLibrary, HostCompiler, Obstacle, ToolchainSource, Toolkit
from kernel_builder.config import compiler_flags
from kernel_builder.config.project import Kernel, Project, arch_number
from kernel_format.errors import ConfigError
from kernel_format.release import Release, is_within
from kernel_format.variant import Abi, FullAbi, StableAbi, TvmFfiAbi
from kernel_sandbox.programs import find_program

# Restrictions on projects.

# Characters that nvcc's shell changes, in names of sources and of directories with headers.
_OF_THE_SHELL = {"src": r'[,"$`\\]', "include": r"""[,"'$`\\]"""}


@cache
def nvcc_options() -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Return the forms of the flags for nvcc that a project may have, and why it may not have others, by name."""
    data = toml_file.read(TABLE.with_name("nvcc_options.toml"))
    plain, valued = ("|".join(map(re.escape, data["allowed"][kind])) for kind in ("plain", "valued"))
    forms = (
        *compiler_flags.HOST,
        rf"--?({plain})|--?({valued})(=[\w,.-]+)?|--?t=?\d+",
        r"--?(Wno-[\w-]+|expt-[\w-]+|extra-[\w-]+(=[\w,-]*)?|(diag|display)[-_][\w-]+(=[\w,-]+)?)",
        r"--?(gpu-architecture|gpu-code|generate-code|gencode|arch|code)=?[\w,=\[\]\"]*",
    )
    return forms, {option: reason for reason, names in data["refused"].items() for option in names}


# The libraries and symbols that a binary may leave undefined, because Torch has loaded them.

_HINTS = {"cuda": "get the function with cudaGetDriverEntryPoint, or "}
_OF_RUNTIME = re.compile(r"(?:__)?cuda[A-Z]")


@cache
def _symbol_families(framework: Abi | None, link_torch: str) -> tuple[SymbolFamily, ...]:
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


class _Cuda(CompiledBackend):
    def allowed(self, project: Project, releases: Sequence[Release | None]) -> list[Release | None]:
        """Return the releases that `[general.cuda]` allows and at least one kernel can be compiled with."""
        floors = [kernel.cuda_minver for kernel in project.kernels if kernel.backend is self]
        needed = min((floor for floor in floors if floor), default=None) if all(floors) else None
        settings = project.backend_settings.get(self, {})
        low = max((floor for floor in (needed, settings.get("minver")) if floor), default=None)
        return [release for release in releases if release and is_within(release, low, settings.get("maxver"))]

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
        yield from super().notes(kernel)
        listed = kernel.cuda_capabilities or ()
        for capability in kernel.only_capabilities if listed else ():
            if not any(runs_on(entry, capability) for entry in listed):
                yield (
                    f"[kernel.{kernel.name}] cuda-capabilities: no code for {', '.join(listed)} runs "
                    f"on a GPU of capability {capability}"
                )

    def limited(self, kernel: Kernel, only: tuple[str, ...]) -> Kernel:
        if kernel.cuda_capabilities and {arch_number(c) for c in kernel.cuda_capabilities} <= set(only):
            return kernel
        return super().limited(kernel, only)

    def known_archs(self) -> list[str]:
        return sorted({c for known in KNOWN_CAPABILITIES.values() for c in known}, key=capability_key)

    def archs(self, kernels: Sequence[Kernel], release: Release | None, platform: str) -> tuple[str, ...]:
        assert release
        every = {c for kernel in kernels for c in capabilities(kernel, release, platform)}
        return tuple(sorted(every, key=capability_key))

    def obstacle(
        self, toolchains: ToolchainSource, release: Release | None, *, with_torch: bool = True
    ) -> Obstacle | None:
        assert release
        return toolkits.obstacle(toolchains, release, with_torch=with_torch)

    def toolkit(self, toolchains: ToolchainSource, release: Release | None) -> CudaToolkit:
        assert release
        return toolkits.toolkit(toolchains, release)

    def toolkit_libraries(self, toolchains: ToolchainSource, toolkit: Toolkit) -> HeaderLibrary | None:
        return toolkits.library_headers(toolchains, as_cuda(toolkit))

    def provenance(self, toolkit: Toolkit | None) -> dict[str, str]:
        """Return clang's version. nvcc's release is in the variant's name."""
        clang = as_cuda(toolkit).clang if toolkit else None
        return {"cuda-compiler": f"clang {clang.version}, CUDA {as_cuda(toolkit).version}"} if clang else {}

    def shell(self, toolkit: Toolkit, host: HostCompiler) -> tuple[list[Path], dict[str, str]]:
        cuda = as_cuda(toolkit)
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
        for key, name in [("src", source), *(("include", entry) for entry in kernel.include)]:
            if re.search(_OF_THE_SHELL[key], name):
                raise ConfigError(
                    f"nvcc cannot compile {source} with {name!r}: it splits names at commas and passes the rest to a "
                    "shell",
                    where=f"{where} {key}",
                    hint="rename the file or directory: letters, digits, dots, dashes and underscores are safe",
                )

    def device_roots(self, toolkit: Toolkit | None) -> dict[str, Path]:
        clang = as_cuda(toolkit).clang
        return {commands.CLANG: clang.root} if clang else {}

    def device_command(self, host: HostCompiler, toolkit: Toolkit | None, options: CompileOptions) -> DeviceCommand:
        cuda = as_cuda(toolkit)
        archs = capabilities(options.kernel, cuda.release, host.platform)
        return (commands.by_clang if cuda.clang else commands.by_nvcc)(host, cuda, options, archs)

    def static_runtime(self, toolkit: Toolkit | None) -> Path:
        return as_cuda(toolkit).lib / "libcudart_static.a"

    def needed_libraries(self, release: Release | None) -> frozenset[str]:
        names = {*super().needed_libraries(release)}
        for stem, entry in self.data["library"].items():
            version = entry.get("soname", {})
            every = (
                [version]
                if isinstance(version, str)
                else [of for major, of in version.items() if release is None or int(major) == release.major]
            )
            names |= {f"lib{stem}.so.{of}" for of in every}
        return frozenset(names)

    def symbol_families(self, framework: Abi | None) -> tuple[SymbolFamily, ...]:
        return _symbol_families(framework, self.link_torch)

    def device_code(self, binary: Path, read_at: ReadAt) -> list[DeviceCode]:
        return fatbin.read(binary, read_at)

    def lacking(self, symbol: str, release: Release) -> str | None:
        """Return which runtimes lack a function that clients load a variant with: of its major, and no older minor."""
        if not _OF_RUNTIME.match(symbol):
            return None
        known = runtime_exports().items()
        loading = {cuda: names for cuda, names in known if cuda.major == release.major and cuda >= release}
        lacking = " and ".join(str(cuda) for cuda, names in loading.items() if symbol not in names)
        return f"is not in the runtime of CUDA {lacking}, which loads this variant too" if lacking else None

    def current_archs(self) -> tuple[str, ...]:
        import torch

        if not torch.cuda.is_available():
            return ()
        return (".".join(map(str, torch.cuda.get_device_capability())),)

    def is_present(self) -> bool:
        return find_program("nvidia-smi") is not None


CUDA = _Cuda(
    name="cuda",
    title="CUDA",
    prefix="cu",
    suffixes=frozenset({".cu"}),
    table=TABLE,
    preference=3,
    defines=("-DUSE_CUDA",),
    library_headers=re.compile("|".join(DATA["headers"]["need-libraries"])),
    # Torch does not load the driver in a way that others see, and a binary that only named it would not load on a
    # machine without a driver.
    linked_if_called=(LinkedIfCalled("libcuda.so.1", symbols=" cu[A-Z]", but_not=" cuFile"),),
    archs_key="cuda_capabilities",
    dispatch_key="CUDA",
    torch_version="cuda",
    warp_sizes=(32,),
    looks_like=re.compile(r"lib(?:cu[a-z]|nv[a-zA-Z]|nccl|torch_cuda|c10_cuda)"),
)
