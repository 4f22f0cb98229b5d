"""The error of a package for CUDA whose tensors are on the CPU."""

from __future__ import annotations

import torch

from ._ops import add_op_namespace_prefix


def refuse_cpu(*names: str) -> None:
    """Let ops of a package for CUDA say, for tensors on the CPU, which package to load.

    `get_kernel` loads the package for CUDA wherever Torch was built for CUDA, also on a machine without a GPU. Torch's
    own error does not tell what to do there.
    """
    if "_cuda_" not in add_op_namespace_prefix(""):
        return
    for name in names:
        torch.library.impl(add_op_namespace_prefix(name), "CPU")(_refuse)


def _refuse(*arguments: object, **options: object) -> None:
    raise NotImplementedError(
        "this package is for CUDA, and the tensors are on the CPU: move them to the GPU, or load the package for the "
        'CPU with get_kernel(..., backend="cpu")'
    )
