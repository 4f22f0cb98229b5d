"""ROCm: releases and architectures, clang's command line for HIP, device code, and the libraries that Torch has loaded.

No binary of this back end has run on an AMD GPU: the toolchain is assembled from the parts of ROCm on the package
index, which `rocm.toml` lists. Projects have to be on Torch's stable ABI, since no package index has a Torch for ROCm.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kernel_builder import elf, toml_file
from kernel_builder.backends import CLANG, CompiledBackend, DeviceCode, DeviceCommand, ReadAt, SymbolFamily
from kernel_builder.backends.cuda import CUDA
from kernel_builder.backends.host_code import HEADERS_PRINTED, CompileOptions, Compiler, of_gxx, path_maps, token
from kernel_builder.backends.rocm import device_libraries, hipify
from kernel_builder.backends.tools import ComponentFiles, HostCompiler, Obstacle, ToolchainSource, Toolkit
from kernel_builder.config import compiler_flags
from kernel_builder.config.project import Kernel, Project, TorchFramework, TvmFfi
from kernel_builder.probe_cache import ProbeCache
from kernel_format.errors import VariantError
from kernel_format.release import Release
from kernel_format.variant import Abi

NOT_RUN = "compiled and checked, not run on AMD hardware"

_TABLE = Path(__file__).with_name("rocm.toml")
_HIP = "hip-7.1"
_PLATFORM, _TARGET = "x86_64-linux", "x86_64-linux-gnu"
# Directories in commands.
_TOOLKIT, _CLANG, _DEVICE_LIBRARIES = token("rocm"), token("clang"), token("rocm-device-libraries")
# The bundles of code objects in a binary.
_CODE_SECTION = ".hip_fatbin"
_CODE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_CODE_ALIGNMENT = 4096
_NUMBER, _ENTRY = struct.Struct("<Q"), struct.Struct("<QQQ")
# The start of a target's name; the architecture follows.
_CODE_TARGET = "hipv4-amdgcn-amd-amdhsa--"


@dataclass(frozen=True, kw_only=True)
class RocmToolkit(Toolkit):
    """clang with the headers and libraries of HIP."""

    version: str  # that of the headers, for example `7.1.25424`
    clang: ComponentFiles
    device_libraries: Path  # the directory with the device libraries, as clang looks for them
    translations: ProbeCache  # sources that its hipify has translated


# Command lines.

# Where a step has the two programs that the driver looks for, and a header.
_ADDED = "builder/rocm"


_BY_CLANG = Compiler(
    "clang",
    environment={"ZIG": f"{_CLANG}/zig", "CC_PRINT_HEADERS": "1", "CC_PRINT_HEADERS_FILE": HEADERS_PRINTED},
    to_assembler=None,  # LLVM's, which alone assembles for AMD; the include scan refuses .incbin
    hint="hipify has translated the common part of CUDA and HIP; guard the rest, such as PTX, with #ifndef USE_ROCM. "
    "The toolchain has no hipCUB, no rocPRIM and no algorithms of Thrust",
)


class _Rocm(CompiledBackend):
    def why_not_compiled(self, project: Project) -> str:
        if isinstance(project.framework, TvmFfi):
            return "without Torch, which brings the HIP runtime, a binary would need a static one, and there is none"
        if isinstance(project.framework, TorchFramework) and self not in project.framework.stable_abi:
            return (
                "it is on the full C++ ABI, and no package index has a Torch for ROCm, whose headers (c10/hip) that "
                'needs; [torch] stable-abi = { rocm = "2.10" } builds it on the stable ABI'
            )
        return ""

    def torch_index(self, release: Release | None) -> str:
        return f"rocm{release}" if release else self.name

    def known_archs(self) -> list[str]:
        return list(self.data["archs"]["known"])

    def archs(self, kernels: Sequence[Kernel], release: Release | None, platform: str) -> tuple[str, ...]:
        every = {arch for kernel in kernels for arch in self._archs_of(kernel)}
        return tuple(arch for arch in self.known_archs() if arch in every)

    def _archs_of(self, kernel: Kernel) -> list[str]:
        """Return the architectures to compile a kernel for: those of its list, or the usual ones."""
        listed = self.data["archs"]["default"] if kernel.rocm_archs is None else kernel.rocm_archs
        wanted = [arch for arch in self.known_archs() if arch in listed]
        if not wanted:
            raise VariantError(
                f"no architecture is left: clang does not compile for {', '.join(listed) or 'an empty list'}",
                where=f"build.toml: [kernel.{kernel.name}] rocm-archs",
                hint=f"add one of {', '.join(self.known_archs())}",
            )
        # The link needs the symbols of every kernel, so one without the wanted architectures keeps its first.
        limited = [arch for arch in wanted if not kernel.only_capabilities or arch in kernel.only_capabilities]
        return limited or wanted[:1]

    def obstacle(
        self, toolchains: ToolchainSource, release: Release | None, *, with_torch: bool = True
    ) -> Obstacle | None:
        return toolchains.component_obstacle(_HIP) or toolchains.component_obstacle(CLANG)

    def toolkit(self, toolchains: ToolchainSource, release: Release | None) -> RocmToolkit:
        """Return the one toolkit of all releases: a binary with functions of 7.1 only works with later ones of 7."""
        pinned, clang = toolchains.component(_HIP), toolchains.component(CLANG)
        archs = self.known_archs()
        identity = device_libraries.identity(clang, pinned.identity, archs)
        return RocmToolkit(
            name=self.name,
            root=pinned.root,
            release=min(filter(None, self.releases())),
            include=(pinned.root / "include",),
            identity=identity,
            version=pinned.version,
            clang=clang,
            device_libraries=toolchains.derived(
                f"rocm-device-libraries-{identity[:16]}",
                "ROCm's device libraries",
                lambda directory: device_libraries.make(clang, pinned.root, archs, directory),
            ),
            translations=ProbeCache(toolchains.cache / "translations" / pinned.identity[:16]),
        )

    def provenance(self, toolkit: Toolkit | None) -> dict[str, str]:
        own = _own(toolkit)
        return {"rocm-compiler": f"clang {own.clang.version}, HIP {own.version}", "status": NOT_RUN}

    def shell(self, toolkit: Toolkit, host: HostCompiler) -> tuple[list[Path], dict[str, str]]:
        return [_own(toolkit).clang.root], {"ROCM_PATH": str(toolkit.root)}

    def check_flags(self, project: Path, table: str, kernel: Kernel) -> None:
        compiler_flags.check(
            project, table, "hip-flags", kernel.hip_flags, (*compiler_flags.HOST, *self.data["clang"]["allowed"])
        )

    def device_roots(self, toolkit: Toolkit | None) -> dict[str, Path]:
        own = _own(toolkit)
        return {_CLANG: own.clang.root, _DEVICE_LIBRARIES: own.device_libraries}

    def device_command(self, host: HostCompiler, toolkit: Toolkit | None, options: CompileOptions) -> DeviceCommand:
        own, kernel = _own(toolkit), options.kernel
        generated = {
            f"{_ADDED}/{name}": (Path(__file__).parents[2] / "templates/rocm" / name).read_text()
            for name in ("clang-offload-bundler", "lld", "additions.h")
        }
        path = options.source
        if PurePosixPath(path).suffix != ".hip":
            include = (*kernel.include, "csrc")
            translated = hipify.translate(own.root, options.project, path, options.files, include, own.translations)
            path = translated.source
            generated |= {f"src/{name}": text for name, text in translated.files.items()}
        argv = (
            f"{_CLANG}/zig",
            "clang",
            f"--target={_TARGET}",
            "-x",
            "hip",
            "-c",
            f"src/{path}",
            f"-std=c++{options.standard}",
            *self.data["clang"]["flags"],
            *of_gxx(host),
            f"-B{_ADDED}",
            f"-resource-dir={_CLANG}",
            f"--rocm-path={_TOOLKIT}",
            f"--rocm-device-lib-path={_DEVICE_LIBRARIES}",
            f"--hip-version={own.version}",
            "-include",
            f"{_ADDED}/additions.h",
            *(f"--offload-arch={arch}" for arch in self._archs_of(kernel)),
            *options.defines,
            *options.includes,
            *kernel.hip_flags,
            *path_maps(options.roots, "-ffile-prefix-map"),
            # Names of internal symbols contain it. By default it is a digest of the command and the source's path.
            f"-cuid={hashlib.sha256(options.alias.encode()).hexdigest()[:16]}",
        )
        return DeviceCommand(argv, _BY_CLANG, generated)

    def symbol_families(self, framework: Abi | None) -> tuple[SymbolFamily, ...]:
        names = toml_file.read(_TABLE.with_name("rocm_runtime.toml"))["functions"]
        functions = re.compile(rf"(?:{'|'.join(map(re.escape, names))})$")
        libraries = re.compile(r"libtorch_hip\.so|libamdhip64\.so")
        return (SymbolFamily("the HIP runtime", functions, libraries, self.link_torch),)

    def device_code(self, binary: Path, read_at: ReadAt) -> list[DeviceCode]:
        return _code_objects(binary, read_at)

    def is_present(self) -> bool:
        return Path("/dev/kfd").exists()


def _own(toolkit: Toolkit | None) -> RocmToolkit:
    assert isinstance(toolkit, RocmToolkit)
    return toolkit


def _code_objects(binary: Path, read_at: ReadAt) -> list[DeviceCode]:
    """Return the code objects that HIP keeps in a binary, one for each architecture of each source."""
    section = next((section for section in elf.sections(binary) if section.name == _CODE_SECTION), None)
    if section is None:
        return []
    try:
        return [
            DeviceCode(name.removeprefix(_CODE_TARGET), False, size, source)
            for source, name, size in _targets(read_at, section.offset, section.offset + section.size)
            if name.startswith(_CODE_TARGET)
        ]
    except (struct.error, ValueError) as error:
        raise elf.Unreadable(f"{binary.name} has a damaged code object: {error!r}") from error


def _targets(read_at: ReadAt, start: int, stop: int) -> Iterator[tuple[int, str, int]]:
    """Yield the targets and sizes in the bundles of a section, which begin at multiples of the page size."""
    source = 0
    while start < stop and read_at(start, len(_CODE_MAGIC)) == _CODE_MAGIC:
        position = end = start + len(_CODE_MAGIC)
        (count,) = _NUMBER.unpack(read_at(position, _NUMBER.size))
        position += _NUMBER.size
        for _ in range(count):
            offset, size, length = _ENTRY.unpack(read_at(position, _ENTRY.size))
            position += _ENTRY.size
            yield source, read_at(position, length).decode(), size
            position += length
            end = max(end, start + offset + size)
        start += -(-(max(position, end) - start) // _CODE_ALIGNMENT) * _CODE_ALIGNMENT
        source += 1


ROCM = _Rocm(
    name="rocm",
    title="ROCm",
    prefix="rocm",
    suffixes=frozenset({".cu", ".hip"}),
    platforms=(_PLATFORM,),
    table=_TABLE,
    # As in Torch's own build of extensions defines.
    defines=("-DUSE_ROCM=1", "-D__HIP_PLATFORM_AMD__=1"),
    archs_key="rocm_archs",
    # Torch calls AMD GPUs `cuda`.
    dispatch_key="CUDA",
    torch_version="hip",
    warp_sizes=(32, 64),
    translates=CUDA,
    # shim_cuda.cpp of Torch is among the sources that its own build hipifies (libtorch_cuda_core_sources in
    # build_variables.bzl), and hipify does not rename its functions.
    shims_of="cuda",
    looks_like=re.compile(r"lib(?:amdhip|amd_comgr|hip[a-z]|hsa|MIOpen|rccl|roc[a-z]|torch_hip|c10_hip)"),
)
