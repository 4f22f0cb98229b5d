"""Command lines of g++, nvcc, clang and the linker.

A command must give the same bytes in every directory and on every machine. Paths are relative to the step's directory,
or tokens for directories that the compiler maps out of `__FILE__`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_builder.build.graph import CLANG, CUDA, SYSROOT
from kernel_builder.config.variant import Release
from kernel_builder.toolchain.tools import CudaToolkit, HostCompiler

# Raise when a change to the builder changes the bytes that a step gives for an equal command.
RECIPE = 1

EXPORTS = "{ global: PyInit_*; local: *; };\n"

# Without -ffp-contract=off, GNU's dialects of C++ fuse a product and a sum where the CPU can, and round once.
_CXX_FLAGS = ("-O3", "-DNDEBUG", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
_NVCC_FLAGS = (
    "-O3",
    "-DNDEBUG",
    # The public builder defines it for sources of nvcc; kernels with 8-bit floating point leave that out without it.
    "-DENABLE_FP8",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden",
)
# ptxas spills registers of what clang makes of some kernels without these. Loop strength reduction keeps a pointer for
# each access of a loop, where one index would do; and clang's own schedule keeps many values alive.
CLANG_DEVICE_FLAGS = ("-Xarch_device", "-mllvm=-disable-lsr", "-Xarch_device", "-mllvm=-nvptx-sched4reg")
_CLANG_FLAGS = (
    "-O3",
    "-DNDEBUG",
    "-DENABLE_FP8",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    # Neither files of the user or the system, nor the directory of the step, may change what it makes.
    "--no-default-config",
    # A directory that does not exist: the C library is the one of g++, which need not be in /usr/include.
    "--sysroot=no-sysroot",
    # GNU's assembler lists the files of .incbin, and is that of g++.
    "-fno-integrated-as",
    "-ffile-compilation-dir=.",
    *CLANG_DEVICE_FLAGS,
    # Every driver for CUDA 12 can read this compression. Smaller ones need a driver for 12.4.
    "-Xcuda-fatbinary",
    "--compress-all",
    "-Xcuda-fatbinary",
    "--compress-mode=speed",
)
# Where a step has templates/clang/ptxas, which corrects the PTX.
PTXAS = "builder/ptxas"
# The triple of the host code, by the platform that variant names write.
_CLANG_TARGETS = {"x86_64-linux": "x86_64-linux-gnu", "aarch64-linux": "aarch64-linux-gnu"}
LINK_FLAGS = (
    "-shared",
    "-nodefaultlibs",
    "-Wl,--build-id=none",
    "-Wl,--strip-all",
    "-Wl,--gc-sections",
    "-Wl,-z,noexecstack,-z,relro,-z,now",
    "-Wl,--version-script=exports.map",
    f"-L{SYSROOT}/lib",
)


@dataclass(frozen=True)
class CompileOptions:
    """What the commands of g++ and nvcc have in common.

    Attributes:
        source: The source, relative to the project.
        alias: What the compilers are told instead of the source's path. They derive names of internal symbols from it,
            so it is different for each use of a source.
        standard: The C++ standard, for example 17.
        defines: `-D` options.
        includes: `-I` and `-isystem` options.
        cxx_flags: The project's flags for C++ sources.
        roots: Token -> the directory it stands for.
    """

    source: str
    alias: str
    standard: int
    defines: tuple[str, ...]
    includes: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    roots: Mapping[str, Path]


def gxx(host: HostCompiler, cuda: CudaToolkit | None, options: CompileOptions) -> tuple[str, ...]:
    """Return the g++ command for a C++ source. Sources of the cuda backend see CUDA's headers."""
    return (
        str(host.path),
        "-c",
        f"src/{options.source}",
        f"-std=gnu++{options.standard}",
        *_CXX_FLAGS,
        *options.defines,
        *options.includes,
        *(system_includes(CUDA, cuda.root, cuda.include) if cuda else ()),
        *options.cxx_flags,
        *_path_maps(options.roots),
        f"-frandom-seed={options.alias}",
    )


def nvcc(
    host: HostCompiler,
    cuda: CudaToolkit,
    options: CompileOptions,
    capabilities: Sequence[str],
    cuda_flags: Sequence[str],
) -> tuple[str, ...]:
    """Return the nvcc command for a CUDA source."""
    assert cuda.nvcc
    return (
        str(cuda.nvcc),
        "-c",
        f"src/{options.source}",
        _ccbin(host),
        f"-std=c++{options.standard}",
        *_NVCC_FLAGS,
        *_gencode(capabilities),
        *_compression(cuda.release),
        *options.defines,
        *options.includes,
        *cuda_flags,
        f"-Xcompiler={','.join(_path_maps(options.roots))}",
        # nvcc names internal symbols after its process and the source's path unless all of these are given.
        f"--frandom-seed={options.alias}",
        f"-Xcudafe=--orig_src_path_name={options.alias}",
        "--keep",
        "--keep-dir=keep",
    )


def clang(
    host: HostCompiler,
    options: CompileOptions,
    capabilities: Sequence[str],
    cuda_flags: Sequence[str],
    platform: str,
) -> tuple[str, ...]:
    """Return the clang command for a CUDA source. Its host code uses the C++ library and the C library of g++.

    Args:
        cuda_flags: The project's flags, as clang spells them.
    """
    return (
        f"{CLANG}/zig",
        "clang",
        f"--target={_CLANG_TARGETS[platform]}",
        "-x",
        "cuda",
        "-c",
        f"src/{options.source}",
        f"-std=c++{options.standard}",
        *_CLANG_FLAGS,
        *_of_gxx(host),
        f"-resource-dir={CLANG}",
        f"--cuda-path={CUDA}",
        f"--ptxas-path={PTXAS}",
        *_offload(capabilities),
        *options.defines,
        *options.includes,
        *cuda_flags,
        # Line tables of device code, which linking keeps, name the headers too.
        *_path_maps(options.roots, "-ffile-prefix-map"),
        # Names of internal symbols contain it. By default it is a digest of the command and the source's path.
        f"-cuid={hashlib.sha256(options.alias.encode()).hexdigest()[:16]}",
    )


def without_programs(argv: Sequence[str], host: HostCompiler) -> list[str]:
    """Return a command without the paths of its compilers, which are the machine's own business."""
    machines_own = {_ccbin(host), *_of_gxx(host)}
    return [part for part in argv[1:] if part not in machines_own]


def torch_libraries(*, stable: bool, cuda: bool) -> tuple[str, ...]:
    """Return the libraries of Torch that a binary names as needed."""
    host = ("libtorch_cpu.so",) if stable else ("libc10.so", "libtorch_cpu.so", "libtorch.so")
    device = ("libtorch_cuda.so",) if stable else ("libc10_cuda.so", "libtorch_cuda.so")
    return (*host, *(device if cuda else ()))


def system_includes(token: str, root: Path, directories: Sequence[Path]) -> tuple[str, ...]:
    """Return `-isystem` options for directories below `root`, for which `token` stands."""
    below = [directory.relative_to(root).as_posix() for directory in directories]
    return tuple(part for path in below for part in ("-isystem", token if path == "." else f"{token}/{path}"))


def _ccbin(host: HostCompiler) -> str:
    return f"-ccbin={host.path}"


def _of_gxx(host: HostCompiler) -> list[str]:
    """Return clang's options for the headers of g++. Each is one word, so that `without_programs` finds it.

    clang's own headers are searched between those of the C++ library and those of the C library, as g++'s are by g++.
    By the directory of the start files, clang learns the release of libgcc, on which atomics of aarch64 depend.
    """
    cxx, c = host.cxx_include, host.c_include
    return [
        f"--gcc-install-dir={host.install}",
        *(f"-stdlib++-isystem{directory}" for directory in cxx),
        *(f"-idirafter{directory}" for directory in c),
        # Of several that fit, the last counts: directories of the C++ library may be inside those of the C library.
        *(f"-ffile-prefix-map={directory}/=g++/" for directory in (*c, *cxx)),
    ]


def _path_maps(roots: Mapping[str, Path], option: str = "-fmacro-prefix-map") -> list[str]:
    """Return options that remove directories of this machine from `__FILE__`."""
    names = {token: token.strip("\0") for token in roots}
    return [f"{option}=src/=", *(f"{option}={token}/={name}/" for token, name in names.items())]


def _gencode(capabilities: Sequence[str]) -> list[str]:
    arguments = []
    for capability in capabilities:
        base = capability.removesuffix("+PTX")
        number = base.replace(".", "")
        codes = f"sm_{number}" + (f",compute_{number}" if base != capability else "")
        arguments.append(f"-gencode=arch=compute_{number},code=[{codes}]")
    return arguments


def _offload(capabilities: Sequence[str]) -> list[str]:
    names = {capability: f"sm_{capability.removesuffix('+PTX').replace('.', '')}" for capability in capabilities}
    ptx = [f"--cuda-include-ptx={name}" for capability, name in names.items() if capability.endswith("+PTX")]
    return [*(f"--offload-arch={name}" for name in dict.fromkeys(names.values())), "--no-cuda-include-ptx=all", *ptx]


def _compression(cuda: Release) -> list[str]:
    """Compress device code for size. Every driver for CUDA 13 can read it; some for CUDA 12 cannot."""
    return ["--compress-mode=size"] if cuda.major >= 13 else []
