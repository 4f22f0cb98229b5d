"""The kernels that this package depends on, which the client loads with it, and when they may be called."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from kernels import get_kernel_dep
from torch import Tensor
from torch.compiler import is_compiling


def _metadata(package: Path) -> dict[str, Any]:
    return json.loads((package / "metadata.json").read_text())


# The metadata names the repositories: who publishes this package also publishes the kernels that it loads.
_REPOSITORIES = [depend["repo-id"] for depend in _metadata(Path(__file__).parent)["kernel-depends"]]
KERNELS = {repo_id.partition("/")[2]: get_kernel_dep(repo_id) for repo_id in _REPOSITORIES}

adaln, decode, geglu, rmsnorm, rope3d = (KERNELS[name] for name in ("adaln", "decode", "geglu", "rmsnorm", "rope3d"))
is_forward_mode = rmsnorm.derivatives.is_forward_mode
is_transformed = rmsnorm.derivatives.is_transformed

# The type of the devices whose tensors the loaded kernels take: a package for CUDA has no CPU kernels.
DEVICE = _metadata(Path(adaln.__file__).parent)["backend"]["type"]

VERSIONS = {
    "blocks": _metadata(Path(__file__).parent)["version"],
    **{name: _metadata(Path(kernel.__file__).parent)["version"] for name, kernel in KERNELS.items()},
}

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def takes(x: Tensor) -> bool:
    """Return whether the kernels should compute on `x` now.

    Not while `torch.compile` or `torch.export` traces: Inductor fuses a model's own operations with their neighbors,
    and cannot with ours. Not in autocast, which changes the dtypes of a model's own operations. Not in forward-mode
    differentiation, which has no kernels.
    """
    return not (is_compiling() or is_forward_mode() or torch.is_autocast_enabled(DEVICE)) and fits(x)


def fits(x: Any) -> bool:
    """Return whether `x` is a tensor that the kernels can compute on.

    Not subclasses of Tensor, such as DTensor or quantized weights.
    """
    # `x.device.type` takes six times as long.
    return (
        type(x) in PLAIN_TENSORS
        and x.dtype in DTYPES
        and (x.is_cpu if DEVICE == "cpu" else x.is_cuda and DEVICE == "cuda")
    )


def has_rows_for(shape: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return whether the kernels broadcast a modulation of a shape to an expected one as Torch does."""
    if len(shape) == 1:
        return bool(shape[0] == expected[-1])
    if len(shape) != len(expected) or shape[-1] != expected[-1]:
        return False
    ones = False
    for size, full in zip(shape[:-1], expected[:-1]):
        ones = ones or size != full
        if ones and size != 1:
            return False
    return True
