"""The options `--cuda-home` and `--cuda-compiler` of the commands that compile or say what can be compiled."""

from __future__ import annotations

from pathlib import Path

import click

cuda_home_option = click.option(
    "--cuda-home", type=click.Path(path_type=Path), help="A CUDA toolkit to use for its version of CUDA."
)
cuda_compiler_option = click.option(
    "--cuda-compiler",
    type=click.Choice(["nvcc", "clang"]),
    help="Compile every CUDA variant with it. [default: nvcc, and clang for CUDA 12 without --cuda-home]",
)
