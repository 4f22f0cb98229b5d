"""Builds ROCm's device libraries with clang.

clang links ocml.bc and ockl.bc into device code, with one file for each setting that they ask for. Such a file has one
constant, and AMD makes it from a line of C, too.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernel_builder.backends.tools import ComponentFiles
from kernel_format.errors import ToolchainError

# Increase when the same clang and pinned files give other device libraries.
_RECIPE = 1


def identity(clang: ComponentFiles, pinned: str, archs: Sequence[str]) -> str:
    """Return a digest of everything that the device libraries depend on."""
    return hashlib.sha256(repr([_RECIPE, pinned, clang.identity, *_settings(archs)]).encode()).hexdigest()


def make(clang: ComponentFiles, pinned: Path, archs: Sequence[str], directory: Path) -> None:
    """Write the device libraries of all architectures."""
    for name in ("ockl.bc", "ocml.bc"):
        shutil.copyfile(pinned / "lib" / name, directory / name)
    sources = {"opencl": ""}  # clang wants it to be there, for OpenCL
    for name, variable, setting in _settings(archs):
        kind, value = setting.rsplit(maxsplit=1)
        sources[name] = f'const __attribute__((address_space(4), visibility("hidden"))) {kind} {variable} = {value};\n'
    command = [str(clang.root / "zig"), "clang", "--target=amdgcn-amd-amdhsa", "-nogpulib", "-O2", "-c", "-emit-llvm"]
    for name, source in sources.items():
        try:
            subprocess.run(
                [*command, "-x", "c", "-", "-o", f"{name}.bc"],
                input=source.encode(),
                capture_output=True,
                check=True,
                cwd=directory,
            )
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", b"") or str(error).encode()
            raise ToolchainError(
                f"clang cannot compile {name}.bc: {output.decode(errors='replace').strip()}",
                where="ROCm's device libraries",
                hint="`kernel-builder toolchain verify` finds damaged files",
            ) from error


def _settings(archs: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (name of the file, variable, its C type and value)."""
    for arch in archs:
        number = arch.removeprefix("gfx")
        version = int(number[:-2]) * 1000 + int(number[-2], 16) * 100 + int(number[-1], 16)
        yield f"oclc_isa_version_{number}", "__oclc_ISA_version", f"int {version}"
    for version in (500, 600):
        yield f"oclc_abi_version_{version}", "__oclc_ABI_version", f"int {version}"
    for name, variable in (
        ("daz_opt", "__oclc_daz_opt"),
        ("finite_only", "__oclc_finite_only_opt"),
        ("unsafe_math", "__oclc_unsafe_math_opt"),
        ("correctly_rounded_sqrt", "__oclc_correctly_rounded_sqrt32"),
        ("wavefrontsize64", "__oclc_wavefrontsize64"),
    ):
        for state, value in (("off", 0), ("on", 1)):
            yield f"oclc_{name}_{state}", variable, f"unsigned char {value}"
