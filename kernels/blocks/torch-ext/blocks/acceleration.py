"""The public functions: `accelerate` and `restore`."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from . import models  # noqa: F401
from .graphs import add_graphs, remove_graphs
from .replacements import find, put, reason_to_keep, take_out
from .report import Report


def accelerate(model: Any, *, graphs: bool = False) -> Report:
    """Replace what the kernels compute faster in a model, in place.

    Args:
        model: A `torch.nn.Module`, or a pipeline of diffusers, whose modules are all accelerated.
        graphs: Also capture the forward of the model, or of a pipeline's denoisers, as CUDA graphs: at the second call
            with tensors of some shapes, to be replayed from then on. Calls that no graph can serve run as usual; the
            report counts them by reason.

    Returns:
        What was replaced and what was left, and why.

    Raises:
        TypeError: If `model` is neither.
    """
    report = Report()
    for root in _roots(model):
        for module in root.modules():
            _accelerate_module(module, report)
    if graphs:
        report.graphs = add_graphs(model)
    return report


def restore(model: Any) -> None:
    """Undo `accelerate`: every module gets its own class and forward back.

    Raises:
        TypeError: If `model` is neither a `torch.nn.Module` nor a pipeline.
    """
    for root in _roots(model):
        for module in root.modules():
            remove_graphs(module)
            take_out(module)


def _accelerate_module(module: nn.Module, report: Report) -> None:
    remove_graphs(module)
    take_out(module)
    replacement = find(module)
    name = type(module).__name__
    if replacement is None:
        if name.endswith("Norm"):
            report.left[name, f"{type(module).__module__} is not a module that the kernels know"] += 1
        return
    reason = reason_to_keep(module, replacement)
    if reason is not None:
        report.left[name, reason] += 1
        return
    put(module, replacement)
    report.replaced[name, replacement.does] += 1


def _roots(model: Any) -> Iterator[nn.Module]:
    if isinstance(model, nn.Module):
        return iter([model])
    components = getattr(model, "components", None)
    if not isinstance(components, dict):
        raise TypeError(f"blocks: model must be a torch.nn.Module or a pipeline, not {type(model).__name__}")
    return (component for component in components.values() if isinstance(component, nn.Module))
