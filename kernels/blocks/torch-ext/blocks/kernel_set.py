"""The kernels that this package depends on, as the client or their wheels have them, and when they may be called."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ._ops import get_kernel_dep


def _metadata(package: Path) -> dict[str, Any]:
    return json.loads((package / "metadata.json").read_text())


# The metadata names the repositories: who publishes this package also publishes the kernels that it loads.
_REPOSITORIES = [depend["repo-id"] for depend in _metadata(Path(__file__).parent)["kernel-depends"]]
KERNELS = {repo_id.partition("/")[2]: get_kernel_dep(repo_id) for repo_id in _REPOSITORIES}

adaln, decode, geglu, loss, rmsnorm, rope3d = (KERNELS[name] for name in sorted(KERNELS))
# Their functions write to no argument, but for `decode.attention` with a new key.
PACKAGES = (__name__.rpartition(".")[0], *(kernel.__name__ for kernel in KERNELS.values()))
is_forward_mode = rmsnorm.derivatives.is_forward_mode
is_transformed = rmsnorm.derivatives.is_transformed

# The type of the devices whose tensors the loaded kernels take: a package for CUDA has no CPU kernels.
DEVICE = _metadata(Path(adaln.__file__).parent)["backend"]["type"]

VERSIONS = {"blocks": _metadata(Path(__file__).parent)["version"]}
VERSIONS |= {name: _metadata(Path(kernel.__file__).parent)["version"] for name, kernel in KERNELS.items()}

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def is_watched() -> bool:
    """Return whether a function mode, other than that of a default device, sees the calls of Torch."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


_off: ContextVar[bool] = ContextVar("off", default=False)
is_off = _off.get


@contextmanager
def off() -> Iterator[None]:
    """Let accelerated models run as they were, in this thread: `is_off()` is true."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)
