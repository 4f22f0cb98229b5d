"""Projections: their inputs without copies or with them, and a GELU after one in its epilogue."""

from collections.abc import Hashable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from . import probes
from .gated import activation_of, is_near
from .kernel_set import DEVICE, PLAIN_TENSORS, fits, share_memory


def divided(x: Any, divisor: Any) -> Any:
    """Return `x / divisor`, which is `x` for one."""
    return x if divisor == 1 and fits(x) else x / divisor


def joined_tokens(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """Return `torch.cat((first, second), dim)`.

    Two parts of one tensor, as blocks return them, are joined without a copy. Heads stay where they are in memory: an
    attention gives its results the order of q, and a projection copies heads that are apart.
    """
    if dim == 1 and first.dim() != 3:
        return torch.cat((first, second), 1)
    if dim == 2 and first.dim() == 4 and all(x.transpose(1, 2).is_contiguous() for x in (first, second)):
        return torch.cat((first.transpose(1, 2), second.transpose(1, 2)), 1).transpose(1, 2)
    if dim != 1 or second.dim() != 3 or torch.is_grad_enabled():
        return torch.cat((first, second), dim)
    batch, tokens, channels = first.shape
    both = tokens + second.shape[1]
    if (
        first.dtype == second.dtype
        and second.shape[::2] == (batch, channels)
        and first.stride() == second.stride() == (both * channels, channels, 1)
        and second.storage_offset() == first.storage_offset() + tokens * channels
        and share_memory(first, second)
    ):
        return first.as_strided((batch, both, channels), first.stride())
    return torch.cat((first, second), dim)


# --- GELU in the epilogue of a projection -----------------------------------------------------------------------------

# Torch has no documented function for it. The schemas of ATen's ops stay compatible.
_ADDMM_ACTIVATION = getattr(torch.ops.aten, "_addmm_activation", None)
HAS_EPILOGUE = DEVICE == "cuda" and _ADDMM_ACTIVATION is not None


def gelu_fits_epilogue(projection: nn.Module, x: Tensor) -> bool:
    """Return whether `linear_gelu` may compute in place of `projection` and a GELU with the tanh approximation.

    The epilogue has no gradient. On the CPU it computes the exact GELU. Without a bias, Torch does not use it.
    """
    if not (HAS_EPILOGUE and fits(x) and x.dtype != torch.float32 and x.dim() > 1):
        return False
    return is_plain_linear(projection, x.dtype) and not (
        torch.is_grad_enabled()
        and (x.requires_grad or projection.weight.requires_grad or projection.bias.requires_grad)
    )


def is_plain_linear(projection: Any, dtype: torch.dtype) -> bool:
    """Return whether `projection` is nothing but a `torch.nn.Linear` with a bias and parameters of `dtype`."""
    return (
        type(projection) is nn.Linear
        and probes.is_plain(projection)
        and type(projection.weight) in PLAIN_TENSORS
        and projection.weight.dtype == dtype
        and type(projection.bias) in PLAIN_TENSORS
        and projection.bias.dtype == dtype
    )


def linear_gelu(projection: nn.Module, x: Tensor) -> Tensor:
    """Return `gelu(projection(x), approximate="tanh")`, with the GELU in the epilogue of the matrix multiplication."""
    rows = x.flatten(0, -2)
    out = _ADDMM_ACTIVATION.default(projection.bias, rows, projection.weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], out.shape[-1])


def activated_projection(activation: Any, projection: Any, x: Any) -> Any:
    """Return `activation(projection(x))`, in one kernel if the activation fits the epilogue of the projection."""
    if HAS_EPILOGUE and gelu_fits_epilogue(projection, x) and activation_of(activation) == "tanh":
        return linear_gelu(projection, x)
    return activation(projection(x))


_projections: dict[Hashable, bool] = {}


def projection_in(module: nn.Module) -> Optional[str]:
    """Return the name of the projection in a module that computes `gelu(projection(x), approximate="tanh")`, or None.

    None, too, where Torch has no such epilogue.
    """
    cls = type(module)
    if not HAS_EPILOGUE or len(module._modules) != 1 or module._parameters or module._buffers:
        return None
    ((name, projection),) = module._modules.items()
    arguments = probes.required_arguments(cls.forward)
    if type(projection) is not nn.Linear or arguments is None or len(arguments) != 1:
        return None
    key = cls, probes.watched_forward(cls).key(), probes.settings_of(module)
    if key not in _projections:
        _projections[key] = _is_gelu_of_projection(module, name)
    return name if _projections[key] else None


def _is_gelu_of_projection(module: nn.Module, name: str) -> bool:
    with probes.probing() as source:
        x, projection = probes.random((4, 16), source), nn.Linear(16, 24, dtype=torch.float32)
        for parameter in projection.parameters():
            parameter.copy_(probes.random(parameter.shape, source))
        exact = gelu(projection(x), approximate="tanh")
        copy = probes.copied(module, {})
        copy.__dict__["_modules"] = {name: projection}
        try:
            if not probes.agree(copy(x.clone()), exact):
                return False
            projection.bfloat16()
            lower = copy(x.bfloat16())
        except Exception:
            return False
        return is_near(lower, gelu(projection.float()(x.bfloat16().float()), approximate="tanh"))
