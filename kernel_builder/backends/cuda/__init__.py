"""CUDA: `releases` has capabilities, `toolkits` the compilers, `commands` their command lines, `libraries` the symbols.

`cuda.toml`, `cuda_runtimes.toml` and `nvcc_options.toml` are the data.
"""

from kernel_builder.backends.cuda.backend import CUDA
from kernel_builder.backends.cuda.releases import capabilities, known_capabilities, releases

__all__ = ["CUDA", "capabilities", "known_capabilities", "releases"]
