"""The public functions: `accelerate` and `restore`."""

import weakref
from collections.abc import Mapping
from typing import Any, Optional

from torch import nn

from .comparison import Check, compare
from .graphs import add_generation, add_graphs, remove_graphs
from .report import Report, notes_on
from .tracing import trace, untrace

_DENOISERS = ("transformer", "transformer_2", "unet")  # of pipelines

# By accelerated model: the options that it was accelerated with, and its report. No value may refer to the model.
_accelerated: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Report]]" = weakref.WeakKeyDictionary()


def accelerate(
    model: Any, check: Optional[Check] = None, *, graphs: bool = False, scope: Optional[str] = None, logits: bool = True
) -> Report:
    """Replace operations of a model by faster kernels, in place.

    The model keeps its classes, parameters, hooks and `state_dict`. Without `graphs`, `torch.compile` traces it at its
    first call, and again where an input, a module or a global name differs from the trace; other calls run the traced
    operations, with the kernels in place of some. A second call with the same options changes nothing.

    Args:
        model: A `torch.nn.Module`, or a pipeline of diffusers, whose modules are all accelerated.
        check: Inputs to compare and to time the model before and after: a dict of its keyword arguments, a tuple of
            its positional arguments, or a function that gets the model and runs it. The model is restored if it was
            faster, or over 1.1 times as accurate. Of a pipeline only the denoiser (`transformer` or `unet`) is checked.
            True: each trace runs on random inputs with the kernels, without, and in float64. The kernels are not used
            if their error is over twice that without. `checks` of the report has the ratios.
        graphs: Capture the forward of the model, or of a pipeline's denoisers, as CUDA graphs with the kernels, at the
            second call with tensors of some shapes, and whole decoding steps of transformers' `generate`.
        scope: The unit that `torch.compile` traces: `"model"`, for the fastest calls where the host limits them, or
            `"blocks"` in the lists of a model, for a shorter first call. By default, `"blocks"` for more than 28 blocks
            that share traces, else `"model"`; with `graphs`, calls that no graph serves are not traced by default.
        logits: Whether a training step of a language model returns its logits beside its loss. If not, a call with
            labels, in which gradients are recorded, returns None for them, in less time and gigabytes less memory.

    Returns:
        The replaced operations, those left, the reasons, and the check's figures. It grows with each trace and graph.

    Raises:
        TypeError: If `model` or `check` is of another type.
        ValueError: If a pipeline without a denoiser should be checked, or if options exclude each other.
    """
    if scope not in (None, "model", "blocks"):
        raise ValueError(f'blocks: scope must be "model" or "blocks", not {scope!r}')
    if graphs and scope == "model":
        raise ValueError('blocks: graphs=True needs scope="blocks", or none')
    if not logits and (graphs or scope == "blocks"):
        raise ValueError('blocks: logits=False needs scope="model", without graphs')
    if check is True and (graphs or not logits):
        raise ValueError("blocks: check=True excludes graphs=True and logits=False")
    roots = _roots(model)
    denoisers = roots if isinstance(model, nn.Module) else {name: roots[name] for name in _DENOISERS if name in roots}
    inputs = None if check is True else check
    if not (inputs is None or isinstance(inputs, (Mapping, tuple)) or callable(inputs)):
        raise TypeError(f"blocks: check must be True, a dict, a tuple or a function, not {type(check).__name__}")
    if inputs is not None and not denoisers:
        raise ValueError(f"blocks: check needs a transformer or a unet; check each of {', '.join(roots)} alone")
    options = graphs, scope, logits, check is True
    for root in roots.values():
        if root not in _accelerated or _accelerated[root][0] != options:
            _restore_root(root)
            own = Report()
            if scope or not graphs:
                trace(root, own, scope, logits, check is True)
            _accelerated[root] = options, own
    reports = {name: _accelerated[root][1] for name, root in roots.items()}
    parts = [*dict.fromkeys(reports.values())]
    report = parts[0] if isinstance(model, nn.Module) else Report(parts)
    if graphs:
        report.graphs = {name: add_graphs(root, reports[name]) for name, root in denoisers.items()}
        report.generation = add_generation(model, report) if isinstance(model, nn.Module) else {}
    if inputs is not None:
        (name, root), report.check = next(iter(denoisers.items())), None
        try:
            report.check = compare(root, inputs)
        finally:
            if report.check is None or report.check.kept == "eager":
                _restore_root(root)
        if report.check.kept == "eager":
            reports[name].left.update((cls, "the check kept the eager model") for cls, _ in reports[name].replaced)
            reports[name].replaced.clear()
            report.generation = {}
            report.graphs.pop(name, None)
    report.notes = notes_on(roots.values())
    return report


def restore(model: Any) -> None:
    """Undo `accelerate`: every module gets its own forward back.

    Raises:
        TypeError: If `model` is neither a `torch.nn.Module` nor a pipeline.
    """
    for root in _roots(model).values():
        _restore_root(root)


def _restore_root(root: nn.Module) -> None:
    _accelerated.pop(root, None)
    untrace(root)
    for module in root.modules():
        remove_graphs(module)


def _roots(model: Any) -> dict[str, nn.Module]:
    """Return a model by the name of its class, or the models of a pipeline by their names in it."""
    if isinstance(model, nn.Module):
        return {type(model).__name__: model}
    components = getattr(model, "components", None)
    if not isinstance(components, dict):
        raise TypeError(f"blocks: model must be a torch.nn.Module or a pipeline, not {type(model).__name__}")
    return {name: part for name, part in components.items() if isinstance(part, nn.Module)}
