"""Fixtures: real binaries and packages to check."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kernel_builder.checks import ProbeProcess
from tests.support.sample_package import SOURCE, TORCH, Compile, Make, assemble, identity


@pytest.fixture(scope="session")
def probe() -> Iterator[ProbeProcess]:
    """Return a process that imports Torch once, and loads each package in a fork of itself."""
    with ProbeProcess() as process:
        yield process


@pytest.fixture(scope="session")
def compile_module(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Return the function `compile_module(variant, extra_source, *flags)`, which returns a shared object.

    Equal calls compile once. Modules link with empty libraries: a CPU build of Torch has no libtorch_cuda.so, and the
    linker needs 0.2 s to read its libtorch_cpu.so.
    """
    libraries = tmp_path_factory.mktemp("libraries")
    names = ("libtorch_cpu.so", "libtorch_cuda.so", "libtorch_hip.so")
    for name in (*names, "libforeign.so.3", "libcudart.so.12", "libgomp-a34b3233.so.1"):
        command = ["g++", "-shared", "-x", "c++", "/dev/null", f"-Wl,-soname,{name}", "-o", str(libraries / name)]
        subprocess.run(command, check=True)
    done: dict[tuple[str, ...], Path] = {}

    def compile_module(variant: str, extra: str = "", *flags: str, torch_library: str = "-ltorch_cpu") -> Path:
        key = (identity(variant), extra, *flags, torch_library)
        if key not in done:
            directory = tmp_path_factory.mktemp("module")
            source, module = directory / "module.cpp", directory / "module.so"
            source.write_text(SOURCE + extra)
            compiler = ["g++", "-shared", "-fPIC", "-O1", "-std=c++17", "-fvisibility=hidden"]
            compiler += [f"-DID={identity(variant)}"]
            torch = ["-Wl,--no-as-needed", f"-L{libraries}", f"-L{TORCH / 'lib'}", torch_library, "-Wl,--as-needed"]
            subprocess.run([*compiler, str(source), "-o", str(module), *torch, *flags], check=True)
            done[key] = module
        return done[key]

    return compile_module


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return the function `make(variant, module=None, files=None, **metadata)`, which writes a package."""

    def make(
        variant: str, module: Path | None = None, files: Mapping[str, str] | None = None, **metadata: object
    ) -> Path:
        return assemble(tmp_path / "build", variant, module, files, **metadata)

    return make
