"""Call a model as the judge does: the reference in the judge, the candidate and its peers in workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

_SPREAD = 0.5  # of random values around the equal ones that they replace
_SMALL = 0.1  # smaller values, such as the scale of a layer, are replaced by some around one, which no result hides


class Placeholder(NamedTuple):
    """Stands for a tensor in the arguments of a call."""

    number: int


# The names of a worker's failures; a candidate that forges an answer cannot add one.
FAILURES = (
    "forged-answer", "missing-parameter", "no-gradient", "no-model", "not-a-tensor", "patched", "raised", "wrong-dtype",
    "wrong-shape", "wrong-strides",
)  # fmt: skip


class ResultError(Exception):
    """A model or a result that cannot be judged. `kind` is one of FAILURES, under which the judge rejects it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return nested arguments with a placeholder for each tensor, and append each to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Placeholder(len(tensors) - 1)
    return _mapped(value, lambda item: without_tensors(item, tensors))


def with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Put tensors in the place of their placeholders."""
    if isinstance(value, Placeholder):
        return tensors[value.number]
    return _mapped(value, lambda item: with_tensors(item, tensors))


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(function(item) for item in value)
    if type(value) is dict:
        return {name: function(item) for name, item in value.items()}
    return value


def results(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a result, in order; real and imaginary parts for complex numbers.

    Raises:
        ResultError: If it contains anything else, such as a subclass of tensors that may not have been computed.
    """
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return [torch.view_as_real(value.resolve_conj()) if value.is_complex() else value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in results(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in results(item)]
    raise ResultError("not-a-tensor", f"a result is a {type(value).__module__}.{type(value).__qualname__}")


def synchronize(device: str) -> None:
    """Wait for the GPU, so that another process sees the written memory."""
    if device != "cpu":
        torch.cuda.synchronize()


def randomize(model: torch.nn.Module, seed: int) -> list[list[float]]:
    """Replace the values of all parameters whose values are equal; return the length and the old value of each.

    Equal lengths and old values get equal new ones: a candidate's parameters may have other names, orders and shapes.
    """
    replaced = []
    for parameter in model.parameters():
        values = parameter.detach()
        old = float(values.flatten()[0]) if values.numel() and values.is_floating_point() else math.nan
        if not math.isfinite(old) or not bool((values == old).all()):
            continue
        random = torch.Generator().manual_seed((seed + 2 * values.numel() + int(old)) % (1 << 63))
        new = (1.0 if 0 < abs(old) < _SMALL else old) + _SPREAD * (2 * torch.rand(values.numel(), generator=random) - 1)
        values.copy_(new.view(values.shape))
        replaced.append([float(values.numel()), old])
    return sorted(replaced)


def evaluate(
    model: Any, arguments: Any, grads: Sequence[torch.Tensor] | None, parameters: Sequence[str]
) -> list[torch.Tensor]:
    """Return the results of a call and, with gradients of the results, those of its inputs and parameters."""
    if grads is None:
        with torch.no_grad():
            return results(model(*arguments))
    leaves: list[torch.Tensor] = []
    without_tensors(arguments, leaves)
    leaves = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
    named = dict(model.named_parameters())
    if missing := [name for name in parameters if name not in named]:
        raise ResultError("missing-parameter", f"it has no parameter {missing[0]!r}, which the reference has")
    leaves += [named[name] for name in parameters]
    outputs = results(model(*arguments))
    differentiable = [(output, grad) for output, grad in zip(outputs, grads, strict=False) if output.requires_grad]
    if leaves and not differentiable:
        raise ResultError("no-gradient", "its results do not require a gradient, though the task has a backward pass")
    gradients = torch.autograd.grad(
        [output for output, _ in differentiable], leaves, [grad for _, grad in differentiable], allow_unused=True
    )
    filled = [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
    return [output.detach() for output in outputs] + filled
