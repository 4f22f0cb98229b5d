"""The error of results against float64, and beside that of PyTorch's own code in the same dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernel_builder.measure.results import Error


def error(result: torch.Tensor, exact: torch.Tensor) -> Error:
    """The error of a result; infinite, where its shape differs, or the place of what is not finite."""
    if result.shape != exact.shape:
        return Error(math.inf, math.inf)
    if result.numel() == 0:
        return Error(0.0, 0.0)
    difference = result.double() - exact
    norm, scale = exact.norm().item(), exact.abs().max().item()
    mean, most = difference.norm().item(), difference.abs().max().item()
    if not (math.isfinite(mean) and math.isfinite(most)):
        return Error(math.inf, math.inf)
    tiny = torch.finfo(torch.float64).tiny
    return Error(mean / max(norm, tiny), most / max(scale, tiny) / torch.finfo(result.dtype).eps)


def fault(ours: Sequence[Error], eager: Sequence[Error], factor: float) -> str | None:
    """Why results are not good enough beside eager's, or None.

    In the mean they may be `factor` as far from float64. A single element may be off by half a unit more, since there
    it is chance who rounds worse.
    """
    if len(ours) != len(eager):
        return f"it has {len(ours)} results in place of {len(eager)}"
    for number, (one, other) in enumerate(zip(ours, eager, strict=True), 1):
        which = "its error" if len(ours) == 1 else f"the error of result {number}"
        if not one.mean <= factor * other.mean + 1e-9:
            return f"{which} is {one.mean:.2g} of its size, that of eager {other.mean:.2g}"
        if not one.most <= factor * other.most + 0.5:
            return f"{which} is {one.most:.2g} units of precision at an element, that of eager at most {other.most:.2g}"
    return None
