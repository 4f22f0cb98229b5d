"""Values that a rewritten forward computes when they are needed: one kernel then computes several steps.

A residual sum waits for its norm, a norm for its modulation or its rotary embedding. A value without such a successor
is computed by itself, and without a kernel for it, by the model's own operations.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .kernel_set import PLAIN_TENSORS, adaln, fits, has_rows_for, is_like, rmsnorm
from .norms import NormForm, form_of, normalized, weight_for
from .probes import is_plain


class Deferred:
    """A tensor that is computed at the first call of `now`."""

    value: Optional[Tensor] = None
    like: Any = None  # a tensor of its shape, dtype and device, if one exists before it is computed

    def now(self) -> Tensor:
        if self.value is None:
            value = self.computed()
            # Holds its operands no longer than the model itself would.
            self.__dict__ = {"value": value}
        return self.value

    def computed(self) -> Tensor:
        raise NotImplementedError

    def _asked(self, name: str) -> Any:
        like = self.like if self.value is None else self.value
        return getattr(self.now() if like is None else like, name)

    shape = property(lambda self: self._asked("shape"))
    dtype = property(lambda self: self._asked("dtype"))
    device = property(lambda self: self._asked("device"))
    ndim = property(lambda self: self._asked("ndim"))


def now(x: Any) -> Any:
    """Return a value that may be deferred."""
    return x.now() if isinstance(x, Deferred) else x


def pending(x: Any, *classes: type) -> bool:
    """Return whether a value is deferred, of one of the classes, and not computed yet."""
    return type(x) in classes and x.value is None


class _Wide(Deferred):
    """`x.float()`, where the model computes in float32, and rounds to the dtype of `x` at the end."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def computed(self) -> Tensor:
        return now(self.x).float()


def wide(x: Any) -> Any:
    """Return `x.float()`."""
    if not fits(x) and (type(x) is not _Sum or x.value is not None):
        x = now(x)
        if not fits(x):
            return x.float()
    return _Wide(x)


_TIMES = (*PLAIN_TENSORS, _Wide)


def _unless_wide(x: Any) -> Any:
    return x if type(x) is _Wide and x.value is None else now(x)


def _narrowed(x: Any) -> Any:
    return x.x if type(x) is _Wide and x.value is None else x


class _Product(Deferred):
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def computed(self) -> Tensor:
        return now(self.first) * now(self.second)


def times(first: Any, second: Any) -> Any:
    """Return `first * second`."""
    if type(first) not in PLAIN_TENSORS:
        first = _unless_wide(first)
    if type(second) not in PLAIN_TENSORS:
        second = _unless_wide(second)
    if type(first) in _TIMES and type(second) in _TIMES:
        return _Product(first, second)
    return now(first) * now(second)


_Parts = tuple[Tensor, Tensor, Optional[Tensor]]


class _Sum(Deferred):
    """`first + second`, either of which may be a product of a gate and a branch.

    Attributes:
        parts: The residual, the branch and its gate or None, if the kernels can compute the sum.
        narrow: Whether the operands are widened, and the result has the dtype from before that.
    """

    def __init__(self, first: Any, second: Any, parts: Optional[_Parts], narrow: bool = False) -> None:
        self.first, self.second, self.parts, self.narrow = first, second, parts, narrow

    @property
    def like(self) -> Optional[Tensor]:
        return self.parts and self.parts[0]

    def computed(self) -> Tensor:
        x, branch, gate = self.parts or (None, None, None)
        if gate is not None:
            return adaln.gate_residual(x, branch, gate, "last" if self.narrow else "each")
        return x + branch if self.narrow else now(self.first) + now(self.second)

    def normed(self, norm: nn.Module, form: NormForm, scale: Any, shift: Any, last: bool) -> Optional[Tensor]:
        """Compute the sum together with its norm, and return that; None if they cannot be computed together."""
        if self.parts is None:
            return None
        x, branch, gate = self.parts
        if gate is not None and scale is not None and not (self.narrow == last and gate.shape == scale.shape):
            return None
        weight, bias = form.parameters(norm)
        rounding = form.place(weight, bias, x.dtype, last, gate is not None or scale is not None)
        if rounding is None or not _has_rows(form, x):
            return None
        if weight is not None:
            weight, bias = weight_for(weight, x), weight_for(bias, x)
        eps = form.eps_of(norm)
        if gate is None and scale is None and not form.centered:
            normed, value = rmsnorm.add_rms_norm(branch, x, weight, eps, form.offset, rounding)
        elif gate is None and scale is None:
            value, normed = adaln.add_ada_norm(x, branch, None, None, weight, bias, eps)
        else:
            kind = "layer" if form.centered else "rms"
            rounding = "last" if (self.narrow if scale is None else last) else "each"
            value, normed = adaln.gate_residual_ada_norm(
                x, branch, gate, scale, shift, weight, bias, eps, kind, rounding
            )
        self.__dict__ = {"value": value}
        return normed


def _parts_of(x: Any, other: Any, narrow: bool = False) -> Optional[_Parts]:
    """Return the residual, the branch and its gate or None, if the kernels can compute `x + other`."""
    if narrow:
        x, other = _unless_wide(_narrowed(x)), _narrowed(other)
    if not fits(x):
        return None
    if type(other) is _Product and other.value is None:
        for gate, whole in ((other.first, other.second), (other.second, other.first)):
            branch = now(_narrowed(whole)) if narrow else whole
            if is_like(branch, x) and _fits(gate, x, narrow):
                return x, branch, gate
    return (x, other, None) if is_like(other, x) else None


def total(first: Any, second: Any) -> Any:
    """Return `first + second`."""
    if type(first) not in PLAIN_TENSORS and (type(first) is not _Product or first.value is not None):
        first = _unless_wide(first)
    if type(second) not in PLAIN_TENSORS and (type(second) is not _Product or second.value is not None):
        second = _unless_wide(second)
    if type(first) is _Wide or type(second) is _Wide:
        return _Sum(first, second, None)
    parts = _parts_of(first, second) or _parts_of(second, first)
    return now(first) + now(second) if parts is None else _Sum(first, second, parts)


class Normed(Deferred):
    """`norm(x)`.

    Attributes:
        form: The norm's formula.
        state: "wide" if `x` is widened before the norm, "narrow" if the result is also narrowed after it, else None.
    """

    def __init__(self, norm: nn.Module, form: NormForm, x: Any, state: Optional[str] = None) -> None:
        self.norm, self.form, self.x, self.state = norm, form, x, state

    like = property(lambda self: self.x)
    dtype = property(lambda self: self.now().dtype)  # a weight may be wider than x

    def computed(self) -> Tensor:
        if type(self.x) is _Sum and self.x.value is None and self.state != "wide":
            normed = self.x.normed(self.norm, self.form, None, None, self.state == "narrow")
            if normed is not None:
                return normed
        x = self.x if type(self.x) in PLAIN_TENSORS else self.x.now()
        if self.state is None:
            normed = normalized(self.form, self.norm, x)
            return self.norm(x) if normed is None else normed
        normed = self.fused(None, None, last=True) if self.state == "narrow" else None
        if normed is None:
            normed = self.norm(x.float())
        return normed.to(x.dtype) if self.state == "narrow" else normed

    def fused(self, scale: Any, shift: Any, last: bool) -> Optional[Tensor]:
        """Return `norm(x) * (1 + scale) + shift` by one kernel, or None."""
        x, form = self.x, self.form
        if scale is not None and not (
            _fits(scale, x.like if type(x) is _Sum and x.value is None and x.like is not None else x, last)
            and is_like(shift, scale)
        ):
            return None
        if type(x) is _Sum:
            normed = x.normed(self.norm, form, scale, shift, last) if x.value is None else None
            if normed is not None:
                return normed
            x = self.x = x.now()
        weight, bias = form.parameters(self.norm)
        place = form.place(weight, bias, x.dtype, last, scale is not None)
        if place is None or not _has_rows(form, x):
            return None
        if weight is not None:
            weight, bias = weight_for(weight, x), weight_for(bias, x)
        eps, rounding = form.eps_of(self.norm), "last" if last else "each"
        if form.centered:
            return adaln.ada_layer_norm(x, scale, shift, weight, bias, eps, rounding)
        if scale is None:
            return rmsnorm.rms_norm(x, weight, eps, form.offset, place)
        return adaln.ada_rms_norm(x, scale, shift, weight, eps, rounding)


def normed(norm: Any, x: Any) -> Any:
    """Return `norm(x)`."""
    if not fits(x) and (type(x) not in (_Sum, _Wide) or x.value is not None):
        x = now(x)
        if not fits(x):
            return norm(x)
    form = form_of(norm)
    if form is None:
        return norm(now(x))
    return Normed(norm, form, x.x, "wide") if type(x) is _Wide else Normed(norm, form, x)


class _Modulated(Deferred):
    def __init__(self, normed: Normed, scale: Any, shift: Any) -> None:
        self.normed, self.scale, self.shift = normed, scale, shift

    def computed(self) -> Tensor:
        return self.normed.now() * (1 + self.scale) + self.shift


def modulated(normed: Any, scale: Any, shift: Any) -> Any:
    """Return `normed * (1 + scale) + shift`."""
    if type(normed) is Normed and normed.value is None:
        if normed.state == "wide":
            return _Modulated(normed, scale, shift)
        result = None if normed.state else normed.fused(scale, shift, last=False)
        if result is not None:
            return result
    return now(normed) * (1 + scale) + shift


def _has_dtype(x: Any, other: Any) -> bool:
    return x is other or x.dtype == other.dtype


def like_type(value: Any, other: Any) -> Any:
    """Return `value.type_as(other)`."""
    if type(value) is _Modulated and value.value is None and _has_dtype(other, value.normed.x):
        result = value.normed.fused(value.scale, value.shift, last=True)
        if result is not None:
            return result
    if type(value) is Normed and value.value is None and value.state == "wide" and _has_dtype(other, value.x):
        weight, bias = value.form.parameters(value.norm)
        x = value.x.value if type(value.x) is _Sum and value.x.value is not None else value.x
        x = x.like if type(x) is _Sum else x
        place = None if x is None else value.form.place(weight, bias, x.dtype, True, False)
        if place is not None and _has_rows(value.form, x):
            return Normed(value.norm, value.form, value.x, "narrow")
    if type(value) is _Sum and value.value is None:
        for x, y in ((value.first, value.second), (value.second, value.first)):
            if type(x) is _Wide and x.value is None and _has_dtype(other, x.x):
                parts = _parts_of(x, y, True) or _parts_of(y, x, True)
                if parts is not None:
                    return _Sum(x, y, parts, narrow=True)
    return now(value).type_as(now(other))


def called(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`; a rewritten method of a model also gets deferred values, its first ones."""
    is_module = isinstance(function, nn.Module)
    method = type(function).forward if is_module else function
    count = getattr(method, "takes_deferred", 0)
    if not count or (is_module and not is_plain(function)):
        return function(*map(now, args), **kwargs)
    if count < len(args):
        args = (*args[:count], *map(now, args[count:]))
    return method(function, *args, **kwargs) if is_module else function(*args, **kwargs)


def _fits(modulation: Any, x: Any, last: bool) -> bool:
    """Return whether the kernels broadcast a scale, shift or gate to `x` as Torch does, and round as the model does."""
    dtype = torch.float32 if last else x.dtype
    if type(modulation) not in PLAIN_TENSORS or modulation.dtype != dtype or modulation.device != x.device:
        return False
    shape, expected = modulation.shape, x.shape
    if len(shape) == len(expected) == 3:  # the most common ones first
        batch, tokens, size = shape
        rows, more, width = expected
        return size == width and ((tokens == 1 and batch in (1, rows)) or (tokens == more and batch == rows))
    return has_rows_for(shape, expected)


def _has_rows(form: NormForm, x: Tensor) -> bool:
    """Return whether the kernels should normalize `x` together with the operations before or after the norm.

    They copy rows whose elements are apart, as a transformer gets them from a convolution, once: their results are
    contiguous.
    """
    return form.width in (None, x.shape[-1]) and (x.stride(-1) == 1 or x.dim() == 3)
