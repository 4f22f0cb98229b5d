"""How an operator is called from Python, and differentiated, at the least cost for the host."""

from typing import Any, Callable, Optional

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch.compiler import is_compiling

from ._ops import add_op_namespace_prefix, ops


def differentiable(
    name: str, function: "type[torch.autograd.Function]", inputs: Optional[int] = None
) -> Callable[..., Any]:
    """Gives the operator `name` the gradient of `function`, and returns how to call it from Python.

    The result takes the operator's arguments, by position, as `function.apply` does. It does what
    `torch.library.register_autograd` and a call of the operator would do, at less than half of their cost for the
    host: what needs no gradient goes to the device's kernel with nothing of autograd in between, and what needs one
    does not pass through the dispatcher to get back to Python. While `torch.compile` traces, the operator is called
    as it is. `function.forward` calls the operator within `below_autograd`.

    No arguments but the first `inputs` can need a gradient; None: any can.
    """
    packet = getattr(ops, name)
    # What OpOverload.__call__ calls, where there is such a thing: a Python frame less.
    operator = getattr(packet.default, "_op", packet.default)

    def recorded(*arguments):
        if is_grad_enabled():
            for argument in arguments[:inputs]:
                if isinstance(argument, Tensor) and argument.requires_grad:
                    return function.apply(*arguments)
        if is_inference_mode_enabled():  # where there is no autograd to be below of
            return operator(*arguments)
        with below_autograd():
            return operator(*arguments)

    # Not `call`, which would come back here while Torch traces.
    torch.library.impl(add_op_namespace_prefix(name), "Autograd")(recorded)

    def call(*arguments):
        return packet(*arguments) if is_compiling() else recorded(*arguments)

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


# Within `with below_autograd():` operators go to the kernel of the device, and record nothing for a gradient.
below_autograd = torch._C._AutoDispatchBelowAutograd
