"""The command lines of nvcc and of clang for a CUDA source."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from kernel_builder.backends import DeviceCommand
from kernel_builder.backends.cuda import clang_flags
from kernel_builder.backends.cuda.releases import DATA
from kernel_builder.backends.cuda.toolkits import CudaToolkit
from kernel_builder.backends.host_code import HEADERS_PRINTED, CompileOptions, Compiler, ccbin, of_gxx, path_maps, token
from kernel_builder.backends.tools import HostCompiler

# Directories in commands.
_TOOLKIT, CLANG = token("cuda"), token("clang")

# Where a step has templates/clang/ptxas, which corrects the PTX.
_PTXAS = "builder/ptxas"
# And templates/clang/host_math.h, which every source includes.
_HOST_MATH = "builder/host_math.h"


def by_nvcc(host: HostCompiler, cuda: CudaToolkit, options: CompileOptions, archs: Sequence[str]) -> DeviceCommand:
    """Return the command that compiles a source for some capabilities."""
    command = (
        str(cuda.nvcc),
        "-c",
        f"src/{options.source}",
        ccbin(host),
        f"-std=c++{options.standard}",
        *DATA["nvcc"]["flags"],
        *_gencode(archs),
        # Every driver for CUDA 13 can read the smaller compression; some for CUDA 12 cannot.
        *(["--compress-mode=size"] if cuda.release.major >= 13 else []),
        *options.defines,
        *options.includes,
        *options.kernel.cuda_flags,
        f"-Xcompiler={','.join(path_maps(options.roots))}",
        # nvcc names internal symbols after its process and the source's path unless all of these are given.
        f"--frandom-seed={options.alias}",
        f"-Xcudafe=--orig_src_path_name={options.alias}",
        "--keep",
        "--keep-dir=keep",
    )
    return DeviceCommand(command, _NVCC, {})


def by_clang(host: HostCompiler, cuda: CudaToolkit, options: CompileOptions, archs: Sequence[str]) -> DeviceCommand:
    """Return clang's command for a source. Its host code uses the libraries of g++."""
    templates = Path(__file__).parents[2] / "templates/clang"
    files = {name: (templates / name.rpartition("/")[2]).read_text() for name in (_PTXAS, _HOST_MATH)}
    command = (
        f"{CLANG}/zig",
        "clang",
        f"--target={host.platform}-gnu",
        "-x",
        "cuda",
        "-c",
        f"src/{options.source}",
        f"--include={_HOST_MATH}",
        f"-std=c++{options.standard}",
        *(flag for key in ("flags", "device-flags", "fatbinary-flags") for flag in DATA["clang"][key]),
        *of_gxx(host),
        f"-resource-dir={CLANG}",
        f"--cuda-path={_TOOLKIT}",
        f"--ptxas-path={_PTXAS}",
        *_offload(archs),
        *options.defines,
        *options.includes,
        *clang_flags.of_clang(options.kernel.cuda_flags, f"{options.where} cuda-flags"),
        # Line tables of device code, which linking keeps, name the headers too.
        *path_maps(options.roots, "-ffile-prefix-map"),
        # Names of internal symbols contain it. By default it is a digest of the command and the source's path.
        f"-cuid={hashlib.sha256(options.alias.encode()).hexdigest()[:16]}",
    )
    return DeviceCommand(command, _CLANG, files)


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


_NVCC = Compiler("nvcc", threads="--threads={}", directories=("keep",), to_assembler=r"-Xcompiler=-Wa\,--MD\,{}")
_CLANG = Compiler(
    "clang",
    environment={"PTXAS": f"{_TOOLKIT}/bin/ptxas", "CC_PRINT_HEADERS": "1", "CC_PRINT_HEADERS_FILE": HEADERS_PRINTED},
    # For a source that nvcc accepts.
    hint="clang compiles the variants of CUDA 12: guard unsupported code with #ifndef __clang__; or compile "
    'with an nvcc of CUDA 12 (`--cuda-home DIR`); or leave CUDA 12 out by [general.cuda] minver = "13.0"',
)
