"""The kernels that this package depends on, which the client loads with it, and when they may be called."""

import json
from pathlib import Path

import torch
from kernels import get_kernel_dep
from torch import Tensor
from torch.compiler import is_compiling

adaln = get_kernel_dep("kernels-community/adaln")
geglu = get_kernel_dep("kernels-community/geglu")
rmsnorm = get_kernel_dep("kernels-community/rmsnorm")
rope3d = get_kernel_dep("kernels-community/rope3d")


def _read_device() -> str:
    metadata = json.loads((Path(adaln.__file__).parent / "metadata.json").read_text())
    return metadata["backend"]["type"]


# The type of the devices whose tensors the loaded kernels take: a package for CUDA has no CPU kernels.
DEVICE = _read_device()

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)


def takes(x: Tensor) -> bool:
    """Return whether the kernels should compute on `x` now.

    Not while `torch.compile` or `torch.export` traces: Inductor fuses a model's own operations with their neighbours,
    and cannot with ours. Not in autocast, which changes the dtypes of a model's own operations. Not for subclasses of
    Tensor, such as DTensor or quantized weights.
    """
    return (
        type(x) in _PLAIN
        and x.device.type == DEVICE
        and x.dtype in _DTYPES
        and not is_compiling()
        and not torch.is_autocast_enabled(DEVICE)
    )
