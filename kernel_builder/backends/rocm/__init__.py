"""ROCm: releases and architectures, clang's command line for HIP, hipify, and checks of device code.

`rocm.toml` and `rocm_runtime.toml` are the data.
"""

from kernel_builder.backends.rocm.backend import NOT_RUN, ROCM

__all__ = ["NOT_RUN", "ROCM"]
