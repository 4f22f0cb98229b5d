"""The error of a package for GPUs whose tensors are on the CPU."""

from __future__ import annotations

import torch

from ._ops import add_op_namespace_prefix


def refuse_cpu(*names: str) -> None:
    """Let ops of a package for GPUs say, for tensors on the CPU, which package to load.

    `get_kernel` loads the package for CUDA or ROCm wherever Torch was built for it, also on a machine without a GPU.
    Torch's own error does not name the remedy.
    """
    prefix = add_op_namespace_prefix("")
    backend = next((title for part, title in (("_cuda_", "CUDA"), ("_rocm_", "ROCm")) if part in prefix), None)
    if backend is None:
        return

    def refuse(*arguments: object, **options: object) -> None:
        raise NotImplementedError(
            f"this package is for {backend}, and the tensors are on the CPU: move them to the GPU, or load the package "
            'for the CPU with get_kernel(..., backend="cpu")'
        )

    for name in names:
        torch.library.impl(add_op_namespace_prefix(name), "CPU")(refuse)
