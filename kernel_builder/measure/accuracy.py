"""The error of results against float64, compared with the error of eager PyTorch in the same dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernel_builder.measure.results import Deviation
from kernel_builder.plural import counted

# A single element may be this many units in the last place worse than eager's worst element: which of two correct
# roundings hits the worst element is chance.
_SLACK_ULPS = 0.5


def deviation(result: torch.Tensor, exact: torch.Tensor) -> Deviation:
    """Return how far `result` is from `exact`.

    Args:
        result: The result under test, of any shape and floating-point dtype.
        exact: The same result computed in float64, of the same shape.

    Returns:
        Infinite values if the shapes differ, or if `result` is not finite where `exact` is.
    """
    if result.shape != exact.shape:
        return Deviation(math.inf, math.inf)
    if result.numel() == 0:
        return Deviation(0.0, 0.0)
    difference = result.double() - exact
    norm, largest = exact.norm().item(), exact.abs().max().item()
    error_norm, largest_error = difference.norm().item(), difference.abs().max().item()
    if not (math.isfinite(error_norm) and math.isfinite(largest_error)):
        return Deviation(math.inf, math.inf)
    tiny = torch.finfo(torch.float64).tiny
    return Deviation(
        relative=error_norm / max(norm, tiny),
        ulps=largest_error / max(largest, tiny) / torch.finfo(result.dtype).eps,
    )


def fault(ours: Sequence[Deviation], eager: Sequence[Deviation], factor: float) -> str | None:
    """Return why results are not accurate enough, or None if they are.

    Args:
        ours: The deviation of each result under test.
        eager: The deviation of each result of eager PyTorch.
        factor: How many times eager's deviation is allowed.
    """
    if len(ours) != len(eager):
        return f"it has {counted(len(ours), 'result')}, expected {len(eager)}"
    for number, (result, allowed) in enumerate(zip(ours, eager, strict=True), 1):
        which = "its error" if len(ours) == 1 else f"the error of result {number}"
        if not result.relative <= factor * allowed.relative + 1e-9:
            return f"{which} is {result.relative:.2g} relative to its norm, eager's is {allowed.relative:.2g}"
        if not result.ulps <= factor * allowed.ulps + _SLACK_ULPS:
            return f"{which} is {result.ulps:.2g} ulps at the worst element, eager's is at most {allowed.ulps:.2g}"
    return None
