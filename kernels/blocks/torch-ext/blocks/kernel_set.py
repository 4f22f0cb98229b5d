"""The kernels that this package depends on, which the client loads with it, and when they may be called."""

import json
from pathlib import Path
from typing import Any

import torch
from kernels import get_kernel_dep
from torch import Tensor
from torch.compiler import is_compiling

adaln = get_kernel_dep("kernels-community/adaln")
geglu = get_kernel_dep("kernels-community/geglu")
rmsnorm = get_kernel_dep("kernels-community/rmsnorm")
rope3d = get_kernel_dep("kernels-community/rope3d")

KERNELS = {"adaln": adaln, "geglu": geglu, "rmsnorm": rmsnorm, "rope3d": rope3d}


def _metadata(package: Path) -> dict[str, Any]:
    return json.loads((package / "metadata.json").read_text())


# The type of the devices whose tensors the loaded kernels take: a package for CUDA has no CPU kernels.
DEVICE = _metadata(Path(adaln.__file__).parent)["backend"]["type"]

VERSIONS = {
    "blocks": _metadata(Path(__file__).parent)["version"],
    **{name: _metadata(Path(kernel.__file__).parent)["version"] for name, kernel in KERNELS.items()},
}

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)


def takes(x: Tensor) -> bool:
    """Return whether the kernels should compute on `x` now.

    Not while `torch.compile` or `torch.export` traces: Inductor fuses a model's own operations with their neighbours,
    and cannot with ours. Not in autocast, which changes the dtypes of a model's own operations. Not for subclasses of
    Tensor, such as DTensor or quantized weights.
    """
    return (
        not is_compiling()
        and type(x) in _PLAIN
        and x.device.type == DEVICE
        and x.dtype in _DTYPES
        and not torch.is_autocast_enabled(DEVICE)
    )


def is_capturing() -> bool:
    """Return whether the current stream of CUDA records a graph now."""
    return DEVICE == "cuda" and torch.cuda.is_current_stream_capturing()
