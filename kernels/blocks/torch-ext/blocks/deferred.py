"""Values that a rewritten forward computes when they are needed: one kernel then computes what several steps do.

A residual sum waits for its norm, a norm for its modulation or its rotary embedding. What nothing follows that a kernel
computes with it is computed by itself, and where no kernel takes it, by the model's own operations.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .kernel_set import adaln, rmsnorm, takes
from .norms import NormForm, form_of, weight_for

_PLAIN = (Tensor, nn.Parameter)


class Deferred:
    """A tensor that is computed at the first call of `now`."""

    value: Optional[Tensor] = None
    like: Any = None  # what has its shape, dtype and device, where something has before it is computed

    def now(self) -> Tensor:
        if self.value is None:
            self.value = self.computed()
            # Holds its operands no longer than the model itself would.
            self.__dict__ = {"value": self.value}
        return self.value

    def computed(self) -> Tensor:
        raise NotImplementedError

    def _asked(self, name: str) -> Any:
        return getattr(self.now() if self.value is not None or self.like is None else self.like, name)

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


def _unless_pending(x: Any, *classes: type) -> Any:
    return x if pending(x, *classes) else now(x)


def _is_taken(x: Any) -> bool:
    return type(x) in _PLAIN and takes(x)


class _Wide(Deferred):
    """`x.float()`, where the model computes in float32, and rounds to the dtype of `x` at the end."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def computed(self) -> Tensor:
        return now(self.x).float()


def wide(x: Any) -> Any:
    """Return `x.float()`."""
    x = _unless_pending(x, _Sum)
    return _Wide(x) if type(x) is _Sum or _is_taken(x) else x.float()


def _narrowed(x: Any) -> Any:
    return x.x if pending(x, _Wide) else x


class _Product(Deferred):
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def computed(self) -> Tensor:
        return now(self.first) * now(self.second)


def times(first: Any, second: Any) -> Any:
    """Return `first * second`."""
    first, second = _unless_pending(first, _Wide), _unless_pending(second, _Wide)
    if all(type(x) is _Wide or _is_taken(x) for x in (first, second)):
        return _Product(first, second)
    return now(first) * now(second)


class _Sum(Deferred):
    """`first + second`, either of which may be a product of a gate and a branch.

    Attributes:
        narrow: Whether the operands are widened, and the result has the dtype from before that.
        parts: The residual, the branch and its gate or None, if the kernels can compute the sum.
    """

    def __init__(self, first: Any, second: Any, narrow: bool = False) -> None:
        self.first, self.second, self.narrow = first, second, narrow
        self.parts = self._parts(first, second) or self._parts(second, first)
        self.like = None if self.parts is None else self.parts[0]

    def _parts(self, x: Any, other: Any) -> Optional[tuple[Tensor, Tensor, Optional[Tensor]]]:
        if self.narrow:
            x, other = now(_narrowed(x)), _narrowed(other)
        if not _is_taken(x):
            return None
        if pending(other, _Product):
            for gate, whole in ((other.first, other.second), (other.second, other.first)):
                branch = now(_narrowed(whole)) if self.narrow else whole
                if _is_like(branch, x) and _fits(gate, x, self.narrow):
                    return x, branch, gate
        return (x, other, None) if _is_like(other, x) else None

    def computed(self) -> Tensor:
        x, branch, gate = self.parts or (None, None, None)
        if gate is not None:
            return adaln.gate_residual(x, branch, gate, "last" if self.narrow else "each")
        return x + branch if self.narrow else now(self.first) + now(self.second)

    def normed(self, norm: nn.Module, scale: Any, shift: Any, last: bool) -> Optional[Tensor]:
        """Compute the sum together with its norm, and return that; None if they cannot be computed together."""
        x, branch, gate = self.parts or (None, None, None)
        if x is None or (
            gate is not None and scale is not None and not (self.narrow == last and gate.shape == scale.shape)
        ):
            return None
        form, rounding = _form(norm, x, last, gate is not None or scale is not None) or (None, "")
        if form is None:
            return None
        weight, bias = (weight_for(p, x) for p in form.parameters(norm))
        eps = form.eps_of(norm)
        if gate is None and scale is None and not form.centered:
            normed, self.value = rmsnorm.add_rms_norm(branch, x, weight, eps, form.offset, rounding)
        else:
            kind = "layer" if form.centered else "rms"
            rounding = "last" if (self.narrow if scale is None else last) else "each"
            if gate is None and scale is None:
                self.value, normed = adaln.add_ada_norm(x, branch, None, None, weight, bias, eps)
            else:
                self.value, normed = adaln.gate_residual_ada_norm(
                    x, branch, gate, scale, shift, weight, bias, eps, kind, rounding
                )
        self.__dict__ = {"value": self.value}
        return normed


def total(first: Any, second: Any) -> Any:
    """Return `first + second`."""
    first, second = _unless_pending(first, _Wide, _Product), _unless_pending(second, _Wide, _Product)
    result = _Sum(first, second)
    is_pending = result.parts is not None or type(first) is _Wide or type(second) is _Wide
    return result if is_pending else now(first) + now(second)


class Normed(Deferred):
    """`norm(x)`.

    Attributes:
        state: "wide" if `x` is widened before the norm, "narrow" if the result is also narrowed after it, else None.
    """

    def __init__(self, norm: nn.Module, x: Any, state: Optional[str] = None) -> None:
        self.norm, self.x, self.state = norm, x, state
        self.like = x

    dtype = property(lambda self: self.now().dtype)  # a weight may be wider than x

    def computed(self) -> Tensor:
        if pending(self.x, _Sum) and self.state != "wide":
            normed = self.x.normed(self.norm, None, None, self.state == "narrow")
            if normed is not None:
                return normed
        x = now(self.x)
        if self.state is None:
            return self.norm(x)
        normed = self.fused(None, None, last=True) if self.state == "narrow" else None
        if normed is None:
            normed = self.norm(x.float())
        return normed.to(x.dtype) if self.state == "narrow" else normed

    def fused(self, scale: Any, shift: Any, last: bool) -> Optional[Tensor]:
        """Return `norm(x) * (1 + scale) + shift` by one kernel, or None."""
        x = self.x = _unless_pending(self.x, _Sum)
        if scale is not None and not (_fits(scale, x, last) and _fits(shift, x, last) and scale.shape == shift.shape):
            return None
        if type(x) is _Sum:
            normed = x.normed(self.norm, scale, shift, last)
            if normed is not None:
                return normed
            x = self.x = x.now()
        form, place = _form(self.norm, x, last, scale is not None) or (None, "")
        if form is None:
            return None
        weight, bias = (weight_for(p, x) for p in form.parameters(self.norm))
        eps, rounding = form.eps_of(self.norm), "last" if last else "each"
        if form.centered:
            return adaln.ada_layer_norm(x, scale, shift, weight, bias, eps, rounding)
        if scale is None:
            return rmsnorm.rms_norm(x, weight, eps, form.offset, place)
        return adaln.ada_rms_norm(x, scale, shift, weight, eps, rounding)


def normed(norm: Any, x: Any) -> Any:
    """Return `norm(x)`."""
    x = _unless_pending(x, _Sum, _Wide)
    if form_of(norm) is None or not (type(x) in (_Sum, _Wide) or _is_taken(x)):
        return norm(now(x))
    return Normed(norm, x.x, "wide") if type(x) is _Wide else Normed(norm, x)


class _Modulated(Deferred):
    def __init__(self, normed: Normed, scale: Any, shift: Any) -> None:
        self.normed, self.scale, self.shift = normed, scale, shift

    def computed(self) -> Tensor:
        return self.normed.now() * (1 + self.scale) + self.shift


def modulated(normed: Any, scale: Any, shift: Any) -> Any:
    """Return `normed * (1 + scale) + shift`."""
    if pending(normed, Normed):
        if normed.state == "wide":
            return _Modulated(normed, scale, shift)
        result = None if normed.state else normed.fused(scale, shift, last=False)
        if result is not None:
            return result
    return now(normed) * (1 + scale) + shift


def like_type(value: Any, other: Any) -> Any:
    """Return `value.type_as(other)`."""
    if pending(value, _Modulated) and other.dtype == value.normed.x.dtype:
        result = value.normed.fused(value.scale, value.shift, last=True)
        if result is not None:
            return result
    is_wide = pending(value, Normed) and value.state == "wide" and other.dtype == value.x.dtype
    if is_wide and _form(value.norm, value.x, True, False) is not None:
        return Normed(value.norm, value.x, "narrow")
    if pending(value, _Sum) and any(
        pending(x, _Wide) and x.x.dtype == other.dtype for x in (value.first, value.second)
    ):
        narrow = _Sum(value.first, value.second, narrow=True)
        if narrow.parts is not None:
            return narrow
    return now(value).type_as(now(other))


def called(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`; a rewritten method of a model also gets deferred values."""
    if isinstance(function, nn.Module):
        if getattr(type(function).forward, "takes_deferred", False) and _is_plainly_called(function):
            return type(function).forward(function, *args, **kwargs)
    elif getattr(function, "takes_deferred", False):
        return function(*args, **kwargs)
    return function(*map(now, args), **{name: now(value) for name, value in kwargs.items()})


def _is_plainly_called(module: nn.Module) -> bool:
    """Return whether a call of a module does nothing but run the forward of its class."""
    return "forward" not in module.__dict__ and not (
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


def _is_like(branch: Any, residual: Tensor) -> bool:
    return (
        type(branch) in _PLAIN
        and branch.dtype == residual.dtype
        and branch.shape == residual.shape
        and branch.device == residual.device
    )


def _fits(modulation: Any, x: Any, last: bool) -> bool:
    """Return whether the kernels broadcast a scale, shift or gate to `x` as Torch does, and round as the model does."""
    dtype = torch.float32 if last else x.dtype
    if type(modulation) not in _PLAIN or modulation.dtype != dtype or modulation.device != x.device:
        return False
    shape, expected = modulation.shape, x.shape
    if len(shape) == 1:
        return shape[0] == expected[-1]
    if len(shape) != len(expected) or shape[-1] != expected[-1]:
        return False
    ones = False
    for size, full in zip(shape[:-1], expected[:-1]):
        ones = ones or size != full
        if ones and size != 1:
            return False
    return True


def _form(norm: Any, x: Any, last: bool, combined: bool) -> Optional[tuple[NormForm, str]]:
    """Return what the kernels compute for a norm of `x` after a sum or with modulations, and where it rounds.

    Args:
        last: Whether the norm gets `x` in float32, and the result is rounded to the dtype of `x` after all.
        combined: Whether there are modulations or gates.
    """
    form, x = form_of(norm), x.like if pending(x, _Sum) else x
    # The kernels copy rows whose elements are apart, as a transformer gets them from a convolution, once: their results
    # are contiguous.
    if form is None or not takes(x) or form.width not in (None, x.shape[-1]) or (x.stride(-1) != 1 and x.dim() != 3):
        return None
    weight, bias = form.parameters(norm)
    rounding = form.rounding(torch.float32 if last else x.dtype, None if weight is None else weight.dtype)
    if rounding is None or (bias is not None and not form.centered):
        return None
    if last:
        rounding = "last"
    if combined and (
        form.offset
        or not (last or weight is None or weight.dtype == x.dtype)
        or not (form.centered or weight is None or rounding == "last")
    ):
        return None
    return form, rounding
