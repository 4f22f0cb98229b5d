"""How an operator is called from Python, and differentiated, at the least cost for the host."""

from importlib import import_module
from typing import Any, Callable, Optional

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch.autograd import profiler
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling, is_dynamo_compiling

from ._ops import add_op_namespace_prefix, ops

# Of kit/direct.h: what passes Torch's dispatcher by, where this Torch has a way past it.
_binary = import_module("." + add_op_namespace_prefix("").partition("::")[0], __package__)


def _bind() -> bool:
    try:
        return _binary.bind(
            Tensor.__dlpack_c_exchange_api__,
            Tensor,
            torch.nn.Parameter,
            torch.empty(0, device="cpu").is_neg,
            "requires_grad",
            torch._C._dynamo.guards._empty_strided_cpu,
            torch._C._dynamo.guards._empty_strided_cuda,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch._C._len_torch_dispatch_stack,
            torch._C._len_torch_function_stack,
            torch._C._is_tracing,
            profiler,
            "_is_profiler_enabled",
        )
    except AttributeError:  # what this Torch does not have
        return False


_bound = _bind()

# Within `with below_autograd():` operators go to the kernel of the device, and record nothing for a gradient.
below_autograd = torch._C._AutoDispatchBelowAutograd


def past_dispatcher(name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Returns how to call the operator `name` past Torch's dispatcher where kit/direct.h has a way: where the arguments
    are of the plain kind, none needs a gradient, and nobody must see the operator. Else it calls `otherwise`."""
    direct = getattr(_binary, name, None) if _bound else None
    return otherwise if direct is None else direct(otherwise)


def differentiable(
    name: str, function: "Optional[type[torch.autograd.Function]]" = None, inputs: Optional[int] = None
) -> Callable[..., Any]:
    """Gives the operator `name` the gradient of `function`, and returns how to call it from Python.

    The result takes the operator's arguments, by position, as `function.apply` does. It does what
    `torch.library.register_autograd` and a call of the operator would do, at less than half of their cost for the
    host: what needs no gradient goes to the device's kernel with nothing of autograd in between, `past_dispatcher`, and
    what needs one does not pass through the dispatcher to get back to Python. While `torch.compile` traces, the
    operator is called as it is.

    No arguments but the first `inputs` can need a gradient; None: any can. Without a `function`, as for the call in
    another one's forward, nothing is recorded.
    """
    packet = getattr(ops, name)
    # What OpOverload.__call__ calls, where there is such a thing: a Python frame less.
    operator = getattr(packet.default, "_op", packet.default)

    def dispatched(*arguments):
        if is_inference_mode_enabled():  # where there is no autograd to be below of
            return operator(*arguments)
        with below_autograd():
            return operator(*arguments)

    if function is None:
        return past_dispatcher(name, dispatched)

    def recorded(*arguments):
        if is_grad_enabled():
            for argument in arguments[:inputs]:
                if isinstance(argument, Tensor) and argument.requires_grad:
                    return function.apply(*arguments)
        return dispatched(*arguments)

    def seen(*arguments):
        return packet(*arguments) if is_compiling() else recorded(*arguments)

    # Not `seen`, which would come back here while Torch traces.
    torch.library.impl(add_op_namespace_prefix(name), "Autograd")(recorded)
    eager = past_dispatcher(name, seen)

    def call(*arguments):
        return packet(*arguments) if is_dynamo_compiling() else eager(*arguments)

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
        if is_dynamo_compiling():
            packet(*arguments)
        elif direct is not None and direct(*arguments):
            increment_version([argument for argument in arguments[:count] if argument is not None])
        else:
            operator(*arguments)

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
