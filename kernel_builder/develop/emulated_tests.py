"""A pytest plugin: the client loads packages for the CPU, independent of the installed Torch's devices."""

import functools

import kernels

kernels.get_local_kernel = functools.partial(kernels.get_local_kernel, backend="cpu")
