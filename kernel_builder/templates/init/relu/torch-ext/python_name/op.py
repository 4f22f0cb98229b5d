"""The operator as a Python function, with its fake and autograd registrations."""

import torch

from ._ops import add_op_namespace_prefix, ops


def relu(x: torch.Tensor) -> torch.Tensor:
    """Return `max(x, 0)` as a contiguous tensor.

    Args:
        x: Tensor of dtype float32, float16 or bfloat16, of any shape and strides.

    Raises:
        RuntimeError: If `x` has another dtype.
    """
    return ops.relu(x)


@torch.library.register_fake(add_op_namespace_prefix("relu"))
def _relu_fake(x):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("relu_backward"))
def _relu_backward_fake(grad, y):
    return y.new_empty(y.shape)


def _save(ctx, inputs, output):
    ctx.save_for_backward(output)


def _differentiate(ctx, grad):
    (y,) = ctx.saved_tensors
    return ops.relu_backward(grad, y)


def _refuse_second_derivative(ctx, grad):
    raise NotImplementedError("${name}: the gradient of relu cannot be differentiated a second time")


torch.library.register_autograd(add_op_namespace_prefix("relu"), _differentiate, setup_context=_save)
torch.library.register_autograd(add_op_namespace_prefix("relu_backward"), _refuse_second_derivative)
