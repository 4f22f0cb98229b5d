"""CUDA: `releases` has capabilities, `toolkits` the compilers, `commands` their command lines, `libraries` the symbols.

`cuda.toml`, `cuda_runtimes.toml` and `nvcc_options.toml` are the data.
"""

from kernel_builder.backends.cuda.backend import CUDA

__all__ = ["CUDA"]
