"""Norms, recognized by their results, alone and together with residual sums, gates and modulations."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from . import probes
from .kernel_set import PLAIN_TENSORS, adaln, rmsnorm

# The eps of norms that have no such attribute. Torch's default depends on the dtype.
_CONSTANTS = (1e-5, 1e-6, 1e-8, 1e-12)


@dataclass(frozen=True, eq=False)
class NormForm:
    """A norm's formula over the last dimension: `(x - mean) * rsqrt(variance + eps) * (offset + weight) + bias`.

    Attributes:
        sample: A norm like it, to see how it rounds with other dtypes.
        centered: Whether it subtracts the mean.
        weight: The name of the parameter, or None.
        bias: The name of the parameter, or None.
        eps: The name of the attribute, or the number.
        offset: Added to the weight.
        width: The number of elements that it normalizes, or None for any.
        roundings: By dtypes of x and of the weight: where the norm rounds, as in `rmsnorm.rms_norm`, or None.
        places: Results of `place`.
    """

    sample: nn.Module
    centered: bool
    weight: Optional[str]
    bias: Optional[str]
    eps: Union[str, float]
    offset: float
    width: Optional[int]
    roundings: dict[tuple[torch.dtype, Optional[torch.dtype]], Optional[str]] = field(default_factory=dict)
    places: dict[tuple, Optional[str]] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        return "adaln" if self.centered else "rmsnorm"

    def eps_of(self, norm: nn.Module) -> float:
        return getattr(norm, self.eps) if isinstance(self.eps, str) else self.eps

    def rounding(self, dtype: torch.dtype, weight: Optional[torch.dtype]) -> Optional[str]:
        """Return where a norm rounds whose input and weight have these dtypes; None if not as the kernels can."""
        try:
            return self.roundings[dtype, weight]
        except KeyError:
            self.roundings[dtype, weight] = rounding = _rounding(self, dtype, weight)
            return rounding

    def place(
        self, weight: Optional[Tensor], bias: Any, dtype: torch.dtype, last: bool, combined: bool
    ) -> Optional[str]:
        """Return where the norm rounds in a kernel with the operations before or after it; None if no kernel does.

        Args:
            last: Whether the norm gets x in float32, and the result is rounded to `dtype`, that of x, after all.
            combined: Whether there are modulations or gates.
        """
        of_weight = None if weight is None else weight.dtype
        key = dtype, of_weight, bias is None, last, combined
        if key not in self.places:
            rounding = self.rounding(torch.float32 if last else dtype, of_weight)
            if rounding is not None and last:
                rounding = "last"
            is_apart = combined and (
                self.offset
                or not (last or weight is None or of_weight == dtype)
                or not (self.centered or weight is None or rounding == "last")
            )
            self.places[key] = None if is_apart or (bias is not None and not self.centered) else rounding
        return self.places[key]

    def statement(self, norm: nn.Module, x: Tensor, rounding: str) -> Tensor:
        """Compute the norm with Torch, rounding as the kernels do."""
        weight, bias = self.parameters(norm)
        y = x.float()
        if self.centered:
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps_of(norm))
        if self.centered:
            y = y if weight is None else y * (self.offset + weight.float())
            return (y if bias is None else y + bias.float()).to(x.dtype)
        if rounding == "before_weight" and weight is not None:
            y = y.to(x.dtype) * weight
        else:
            y = (y if weight is None else y * (self.offset + weight.float())).to(x.dtype)
        return y if bias is None else y + bias

    def parameters(self, norm: nn.Module) -> tuple[Optional[Tensor], Optional[Tensor]]:
        return self.weight and norm._parameters[self.weight], self.bias and norm._parameters[self.bias]


# --- recognition ------------------------------------------------------------------------------------------------------

_forms: dict[Hashable, Optional[NormForm]] = {}


def recognized_norm(norm: nn.Module) -> Optional[NormForm]:
    """Return the formula of a norm's present forward, or None if the kernels do not compute it."""
    form = getattr(type(norm), "_blocks_norm", None)
    if form is not None:
        return form
    cls = type(norm)
    if not _is_candidate(norm):
        return None
    key = cls, probes.watched_forward(cls).key(), probes.settings_of(norm)
    if key not in _forms:
        with probes.probing() as source:
            _forms[key] = _recognize(norm, source)
    return _forms[key]


def reason_of_norm(norm: nn.Module) -> Optional[str]:
    """Return why the kernels do not compute a norm; None for a module that only contains other norms."""
    if norm._modules:
        return None
    shape = getattr(norm, "normalized_shape", getattr(norm, "dim", ()))
    several = isinstance(shape, (tuple, list)) and len(shape) > 1
    if several or any(p is not None and p.dim() > 1 for p in norm._parameters.values()):
        return "it normalizes over several dimensions"
    return "it computes no norm that a kernel does"


def _is_candidate(norm: nn.Module) -> bool:
    if norm._modules or norm._buffers or type(norm).forward is nn.Module.forward:
        return False
    given = [p for p in norm._parameters.values() if p is not None]
    if len(given) > 2 or any(p.dim() != 1 or p.shape != given[0].shape or type(p) not in PLAIN_TENSORS for p in given):
        return False
    arguments = probes.required_arguments(type(norm).forward)
    return arguments is not None and len(arguments) == 1


def _recognize(norm: nn.Module, source: torch.Generator) -> Optional[NormForm]:
    given = [name for name, p in norm._parameters.items() if p is not None]
    width = norm._parameters[given[0]].shape[0] if given else _width_of(norm)
    sample = _sample(norm, source, torch.float32, width or 24)
    x = _input(source, width or 24)
    try:
        actual = [sample(part) for part in (x, x[0], x[None])]
        fixed = width if given or not _takes_width(sample, x[..., :-1]) else None
    except Exception:
        return None
    if not isinstance(actual[0], Tensor) or actual[0].shape != x.shape:
        return None
    epsilons: list[Any] = [
        name for name, value in norm.__dict__.items() if isinstance(value, float) and 0 < value < 0.1
    ]
    first, second = (*given, None, None)[:2]
    orders = [(first, second), (second, first)] if given else [(None, None)]
    for centered in (False, True):
        for weight, bias in orders:
            for offset in (0.0, 1.0) if weight and not centered else (0.0,):
                for eps in (*epsilons, *_CONSTANTS, torch.finfo(torch.float32).eps):
                    form = NormForm(sample, centered, weight, bias, eps, offset, fixed)
                    parts = zip(actual, (x, x[0], x[None]))
                    if not all(probes.agree(own, form.statement(sample, part, "last")) for own, part in parts):
                        continue
                    if form.rounding(torch.float32, torch.float32 if weight else None) is None:
                        continue
                    lower = form.rounding(torch.bfloat16, torch.bfloat16 if weight else None)
                    return form if lower is not None or isinstance(eps, float) else None
    return None


def _width_of(norm: nn.Module) -> Optional[int]:
    """Return the number of elements that a norm without parameters was made for, if it has it as an attribute."""
    for value in norm.__dict__.values():
        size = value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value
        if type(size) is int and size > 3:
            return size
    return None


def _takes_width(norm: nn.Module, x: Tensor) -> bool:
    try:
        norm(x)
    except Exception:
        return False
    return True


def _sample(norm: nn.Module, source: torch.Generator, dtype: Optional[torch.dtype], width: int) -> nn.Module:
    given = norm._parameters.items()
    return probes.copied(norm, {name: p if p is None else probes.random(width, source, dtype) for name, p in given})


def _input(source: torch.Generator, width: int) -> Tensor:
    """Return rows whose squares are far above eps, and rows where they are not."""
    x = probes.random((2, 5, width), source) + 0.5
    return x * torch.tensor([1.0, 1e-3, 3.0, 1e-2, 0.1])[:, None]


def _rounding(form: NormForm, dtype: torch.dtype, weight_dtype: Optional[torch.dtype]) -> Optional[str]:
    with probes.probing() as source:
        width = form.width or 24
        norm = _sample(form.sample, source, weight_dtype or torch.float32, width)
        # Releases of Torch differ in the eps that stands for None: that of x's dtype, or float32's.
        if isinstance(form.eps, float) and "eps" in norm.__dict__ and dtype != torch.float32:
            return None
        x = _input(source, width).to(dtype)
        try:
            own = norm(x)
        except Exception:
            return None
        for rounding in ("before_weight", "last"):
            if rounding == "before_weight" and (form.centered or form.offset):
                continue
            if probes.agree(own, form.statement(norm, x, rounding)):
                return rounding
    return None


# --- computation ------------------------------------------------------------------------------------------------------


def form_of(norm: Any) -> Optional[NormForm]:
    """Return the formula that the kernels may compute instead of calling `norm` now, or None if it must be called."""
    form = getattr(type(norm), "_blocks_norm", None)
    is_same = form is not None and probes.is_plain(norm) and type(norm)._blocks_watched.are_unchanged()
    return form if is_same else None


def weight_for(parameter: Optional[Tensor], x: Tensor) -> Optional[Tensor]:
    """Return a weight or bias in a dtype that the kernels take beside `x`: that of `x`, or float32."""
    return parameter if parameter is None or parameter.dtype == x.dtype else parameter.float()


def has_rows(x: Tensor, width: Optional[int]) -> bool:
    """Return whether the kernels should normalize `x` over its last dimension, of `width` elements.

    Not if the elements of a row are apart, as in VAEs, which normalize a transposed tensor: the kernels copy it, and
    change the memory format for the convolution that follows.
    """
    return x.dim() > 0 and x.stride(-1) == 1 and (width is None or x.shape[-1] == width)


def normalized(form: NormForm, norm: nn.Module, x: Tensor) -> Optional[Tensor]:
    """Return `norm(x)`, or None if the kernels cannot compute it."""
    if not has_rows(x, form.width):
        return None
    weight, bias = form.parameters(norm)
    rounding = form.rounding(x.dtype, None if weight is None else weight.dtype)
    if rounding is None:
        return None
    if x.dim() == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous():  # heads stay where they are
        y = normalized(form, norm, x.transpose(1, 2))
        return None if y is None else y.transpose(1, 2)
    weight, eps = weight if weight is None else weight_for(weight, x), form.eps_of(norm)
    if form.centered:
        return adaln.ada_layer_norm(x, None, None, weight, weight_for(bias, x), eps)
    y = rmsnorm.rms_norm(x, weight, eps, form.offset, rounding)
    return y if bias is None else y + bias
