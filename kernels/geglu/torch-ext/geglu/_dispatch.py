"""How an operator is called from Python, and differentiated, at the least cost for the host."""

from importlib import import_module
from typing import Any, Callable, Optional

import torch
from torch import Tensor, empty_like, is_grad_enabled, is_inference_mode_enabled
from torch.autograd import profiler
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from ._ops import add_op_namespace_prefix, ops

# The functions of kit/direct.h: None where this Torch has no way to them.
_binary = import_module("." + add_op_namespace_prefix("").partition("::")[0], __package__)
_bound = _binary.bind(getattr(Tensor, "__dlpack_c_exchange_api__", None), Tensor, torch.nn.Parameter)

# Within `with below_autograd():` operators go to the kernel of the device, and record nothing for a gradient.
below_autograd = torch._C._AutoDispatchBelowAutograd

_torch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_trace = torch._C._get_tracing_state


def _operators_are_watched() -> bool:
    """Whether somebody must see each operator: a mode of Torch, such as one that counts them or fakes their tensors, a
    trace of torch.jit, or a profile."""
    return bool(_torch_modes() or _function_modes() or _trace() or profiler._is_profiler_enabled)


def differentiable(
    name: str,
    function: "Optional[type[torch.autograd.Function]]" = None,
    inputs: Optional[int] = None,
    results: "tuple[int, ...]" = (),
    allocate: Optional[Callable[[Tensor], Tensor]] = None,
) -> Callable[..., Any]:
    """Gives the operator `name` the gradient of `function`, and returns how to call it from Python.

    The result takes the operator's arguments, by position, as `function.apply` does. It does what
    `torch.library.register_autograd` and a call of the operator would do, at less than half of their cost for the
    host: what needs no gradient goes to the device's kernel with nothing of autograd in between, and what needs one
    does not pass through the dispatcher to get back to Python. While `torch.compile` traces, the operator is called
    as it is. Without a `function`, nothing is recorded, as that of another call needs it in its forward.

    Args:
        inputs: No arguments but so many, from the first, can need a gradient; None: any can.
        results: For each of one or two results, the index of an argument that has its shape, dtype and device. Then a
            call can pass Torch's dispatcher by, and does where the arguments are of the plain kind and nobody watches.
        allocate: Makes the first result from that argument, where they differ.
    """
    packet = getattr(ops, name)
    # What OpOverload.__call__ calls, where there is such a thing: a Python frame less.
    operator = getattr(packet.default, "_op", packet.default)
    direct = getattr(_binary, name) if _bound and results else None
    first, *second = results or (0,)
    second = second[0] if second else None

    def dispatched(*arguments):
        if is_inference_mode_enabled():  # where there is no autograd to be below of
            return operator(*arguments)
        with below_autograd():
            return operator(*arguments)

    # One function, although it is long: each frame would cost as much as its checks.
    def call(*arguments):
        if function is not None:
            if is_compiling():
                return packet(*arguments)
            if is_grad_enabled():
                for argument in arguments[:inputs]:
                    if isinstance(argument, Tensor) and argument.requires_grad:
                        return function.apply(*arguments)
        # Whether `_operators_are_watched`.
        if direct is None or _torch_modes() or _function_modes() or _trace() or profiler._is_profiler_enabled:
            return dispatched(*arguments)
        like = arguments[first]
        if allocate is not None:
            result = allocate(like)
        else:
            result = empty_like(like) if like.is_contiguous() else like.new_empty(like.shape)
        if second is None:
            return result if direct(result, *arguments) else dispatched(*arguments)
        like = arguments[second]
        other = empty_like(like) if like.is_contiguous() else like.new_empty(like.shape)
        return (result, other) if direct(result, other, *arguments) else dispatched(*arguments)

    if function is not None:

        def recorded(*arguments):
            if is_grad_enabled():
                for argument in arguments[:inputs]:
                    if isinstance(argument, Tensor) and argument.requires_grad:
                        return function.apply(*arguments)
            return dispatched(*arguments)

        # Not `call`, which would come back here while Torch traces.
        torch.library.impl(add_op_namespace_prefix(name), "Autograd")(recorded)
    return call


def changing(name: str, count: int) -> Callable[..., None]:
    """Returns how to call the operator `name`, which changes its first `count` arguments, each a tensor or None, and
    has no gradient. Autograd is told of the change, so that it does not use what another operator saved before it."""
    packet = getattr(ops, name)
    operator = getattr(packet.default, "_op", packet.default)
    direct = getattr(_binary, name) if _bound else None

    def counted(*arguments):
        increment_version([argument for argument in arguments[:count] if argument is not None])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            operator(*arguments)

    torch.library.impl(add_op_namespace_prefix(name), "ADInplaceOrView")(counted)

    def call(*arguments):
        if is_compiling():
            packet(*arguments)
        elif _operators_are_watched() or direct is None or not direct(*arguments):
            operator(*arguments)
        else:
            increment_version([argument for argument in arguments[:count] if argument is not None])

    return call


def differentiable_once(name: str, message: str) -> Callable[..., Any]:
    """As `differentiable`, for an operator whose gradient is an error with `message`."""
    operator = getattr(ops, name).default

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            with below_autograd():
                return operator(*arguments)

        @staticmethod
        def backward(ctx, *grads):
            raise NotImplementedError(message)

    return differentiable(name, Once)
