"""The command lines of nvcc and of clang for a CUDA source, and nvcc's flags as clang spells them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.backends import DeviceCommand
from kernel_builder.backends.cuda.releases import DATA
from kernel_builder.backends.cuda.toolkits import CudaToolkit
from kernel_builder.backends.host_code import HEADERS_PRINTED, CompileOptions, Compiler, ccbin, of_gxx, path_maps, token
from kernel_builder.backends.tools import HostCompiler
from kernel_builder.config.compiler_flags import single
from kernel_format.errors import ConfigError

# Directories in commands.
_TOOLKIT, CLANG = token("cuda"), token("clang")

# Where a step has templates/clang/ptxas, which corrects the PTX.
_PTXAS = "builder/ptxas"
# And templates/clang/host_math.h, which every source includes.
_HOST_MATH = "builder/host_math.h"
# Programs that nvcc runs -> clang's option for theirs; it runs no cudafe++ and no nvlink.
_PASSED_ON = {"compiler": "-Xarch_host", "ptxas": "-Xcuda-ptxas", "fatbin": "-Xcuda-fatbinary"}


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
        *of_clang(options.kernel.cuda_flags, f"{options.where} cuda-flags"),
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


@cache
def _table() -> Mapping[str, Any]:  # the file takes 13 ms
    table: Mapping[str, Any] = toml_file.read(Path(__file__).with_name("nvcc_options.toml"))["clang"]
    return table


def of_clang(flags: Sequence[str], where: str) -> tuple[str, ...]:
    """Return nvcc's flags as clang's."""
    translated: list[str] = []
    for program, option in single(flags):
        if program:
            translated += [_PASSED_ON[program], *option] if program in _PASSED_ON and any(option) else []
        elif re.fullmatch(_table()["shared"], option[0]) and option[0] not in {"-gencode", "-lineinfo"}:
            translated += option
        else:
            translated += _of_nvcc("=".join(option), where)
    return tuple(translated)


def _of_nvcc(written: str, where: str) -> tuple[str, ...]:
    flag = written.lstrip("-")
    if same := _table()["same"].get(flag):
        return tuple(same)
    if match := re.fullmatch(r"maxrregcount=(\d+)", flag):
        return ("-Xcuda-ptxas", f"--maxrregcount={match[1]}")
    if match := re.fullmatch(r"ftemplate-depth=(\d+)", flag):
        return (f"-ftemplate-depth={match[1]}",)
    without_meaning = "|".join(_table()["without_meaning"])
    if re.fullmatch(without_meaning, flag.partition("=")[0]) or re.fullmatch(without_meaning, flag):
        return ()
    architecture = re.match(r"-{1,2}(gencode|generate-code|arch|code|gpu-(architecture|code))\b", written)
    raise ConfigError(
        f"clang, which compiles the variants of CUDA 12, has nothing like nvcc's {written}",
        where=where,
        hint='leave it out, and list the capabilities: cuda-capabilities = ["9.0a"]'
        if architecture
        else 'remove the flag, or leave CUDA 12 out by [general.cuda] minver = "13.0", or compile with an nvcc of '
        "CUDA 12: `--cuda-home DIR`",
    )


_NVCC = Compiler("nvcc", threads="--threads={}", directories=("keep",), to_assembler=r"-Xcompiler=-Wa\,--MD\,{}")
_CLANG = Compiler(
    "clang",
    environment={"PTXAS": f"{_TOOLKIT}/bin/ptxas", "CC_PRINT_HEADERS": "1", "CC_PRINT_HEADERS_FILE": HEADERS_PRINTED},
    # For a source that nvcc accepts.
    hint="clang compiles the variants of CUDA 12: guard unsupported code with #ifndef __clang__; or compile "
    'with an nvcc of CUDA 12 (`--cuda-home DIR`); or leave CUDA 12 out by [general.cuda] minver = "13.0"',
)
