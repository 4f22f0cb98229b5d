"""The activations of diffusers' `FeedForward`."""

from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..kernel_set import DEVICE, geglu, takes
from ..replacements import has_hooks, is_own, replaces

_PLAIN = (Tensor, nn.Parameter)
# Torch has no documented function for it. The schemas of ATen's ops stay compatible.
_ADDMM_ACTIVATION = getattr(torch.ops.aten, "_addmm_activation", None)
_HAS_EPILOGUE = DEVICE == "cuda" and _ADDMM_ACTIVATION is not None


def gelu_fits_epilogue(projection: nn.Module, x: Tensor) -> bool:
    """Return whether `linear_gelu` may compute in place of `projection` and a GELU with the tanh approximation.

    The epilogue has no gradient. On the CPU it computes the exact GELU. Without a bias, Torch does not use it.
    """
    if not (_HAS_EPILOGUE and takes(x) and x.dtype != torch.float32 and x.dim() > 1):
        return False
    return is_plain_linear(projection, x.dtype) and not (
        torch.is_grad_enabled()
        and (x.requires_grad or projection.weight.requires_grad or projection.bias.requires_grad)
    )


def is_plain_linear(projection: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether `projection` is nothing but a `torch.nn.Linear` with a bias and parameters of `dtype`."""
    return (
        type(projection) is nn.Linear
        and "forward" not in projection.__dict__
        and not has_hooks(projection)
        and type(projection.weight) in _PLAIN
        and projection.weight.dtype == dtype
        and type(projection.bias) in _PLAIN
        and projection.bias.dtype == dtype
    )


def linear_gelu(projection: nn.Module, x: Tensor) -> Tensor:
    """Return `gelu(projection(x), approximate="tanh")`, with the GELU in the epilogue of the matrix multiplication."""
    rows = x.flatten(0, -2)
    out = _ADDMM_ACTIVATION.default(projection.bias, rows, projection.weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], out.shape[-1])


def activated_projection(projection: nn.Module, activation: nn.Module, x: Tensor) -> Tensor:
    """Return `activation(projection(x))`, in one kernel if the activation fits the epilogue of the projection."""
    is_tanh_gelu = is_own(activation, nn.GELU) and activation.approximate == "tanh"
    if is_tanh_gelu and gelu_fits_epilogue(projection, x):
        return linear_gelu(projection, x)
    return activation(projection(x))


def _gelu_mismatch(module: nn.Module) -> Optional[str]:
    if module.approximate != "tanh":
        return "its GELU is exact, and the epilogue of a projection has the tanh approximation only"
    return None if isinstance(module.proj, nn.Module) else "it has no projection"


class ProjectedGELU:
    def forward(self, hidden_states: Tensor) -> Tensor:
        if not gelu_fits_epilogue(self.proj, hidden_states):
            return super().forward(hidden_states)
        return linear_gelu(self.proj, hidden_states)


if _HAS_EPILOGUE:
    _does = "GELU in the epilogue of its projection"
    replaces("diffusers.models.activations.GELU", does=_does, kernels=(), mismatch=_gelu_mismatch)(ProjectedGELU)


def _has_projection(module: nn.Module) -> Optional[str]:
    return None if isinstance(module.proj, nn.Module) else "it has no projection"


@replaces("diffusers.models.activations.GEGLU", does="GEGLU", kernels=("geglu",), mismatch=_has_projection)
class ProjectedGEGLU:
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not takes(hidden_states):
            return super().forward(hidden_states, *args, **kwargs)
        return geglu.geglu(self.proj(hidden_states))


def _swiglu_mismatch(module: nn.Module) -> Optional[str]:
    if type(module.activation) is not nn.SiLU:
        return "its activation is not SiLU"
    return _has_projection(module)


@replaces("diffusers.models.activations.SwiGLU", does="SwiGLU", kernels=("geglu",), mismatch=_swiglu_mismatch)
class ProjectedSwiGLU:
    def forward(self, hidden_states: Tensor) -> Tensor:
        if not (takes(hidden_states) and is_own(self.activation, nn.SiLU)):
            return super().forward(hidden_states)
        return geglu.swiglu(self.proj(hidden_states))
