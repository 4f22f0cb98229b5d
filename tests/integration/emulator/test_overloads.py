"""The overloads of math functions in device code: as in CUDA's headers, or `emulate` computes other numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from kernel_emulator import DIRECTORY
from tests.integration.build_command.test_device_code import clang
from tests.support.programs import run

SOURCE = Path(__file__).with_name("overloads.cu")


@pytest.mark.parametrize("compiler", ["nvcc", "clang", "the emulator"])
def test_types_of_math_functions(compiler: str, tmp_path: Path) -> None:
    tools, only_check = Toolchains(), ["-fsyntax-only", "-w"]
    command: list[str | Path]
    if compiler == "nvcc":
        toolkit = toolkits.toolkit(tools, Release(13, 0))
        assert toolkit.nvcc is not None
        includes = [f"-I{path}" for path in toolkit.include]
        command = [toolkit.nvcc, *includes, "-arch=sm_90", "-ptx", "-o", tmp_path / "ptx"]
    elif compiler == "clang":
        command = [*clang(tools), "--offload-arch=sm_90", "--cuda-device-only", *only_check]
    else:
        command = ["g++", "-x", "c++", f"-I{DIRECTORY}", "-include", "emulator.h", *only_check]
    run(*command, "-std=c++17", SOURCE)
