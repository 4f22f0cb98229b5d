"""A plugin of pytest: the client loads packages for the CPU, whichever devices the installed Torch is for."""

import functools

import kernels

kernels.get_local_kernel = functools.partial(kernels.get_local_kernel, backend="cpu")
