"""The public functions: `accelerate` and `restore`."""

import re
from collections.abc import Mapping
from typing import Any, Optional

from torch import nn

from .comparison import Check, compare, is_faster_without, time_shares
from .graphs import add_generation, add_graphs, remove_graphs
from .norms import reason_of_norm
from .replacements import Replacement, find, original_class, put, replacement_in, take_out
from .report import Report, notes_on
from .tracing import is_traced, resume, suspend, trace, untrace

_SLOWER = "the check found the model faster without its replacement"
_KEPT = "the check kept the model as it was"


def accelerate(model: Any, check: Optional[Check] = None, *, graphs: bool = False, scope: str = "modules") -> Report:
    """Replace operations of a model by faster kernels, in place.

    The model keeps its classes, parameters, hooks and `state_dict`; only the forwards of some of its modules change.
    Modules that do not look as expected keep their own forward, and so does every module for an input that the kernels
    do not take: on another device, in autocast, or while `torch.compile` traces. A second call changes nothing.

    With the scope `"model"`, the forwards stay, and `torch.compile` traces the whole model at its first call, which
    takes some seconds. Later calls run the traced operations, with the kernels in place of some, and without the
    Python around them. Torch traces again where an input, a module or a global name differs from the trace.

    Args:
        model: A `torch.nn.Module`, or a pipeline of diffusers, whose modules are all accelerated.
        check: Inputs to compare and to time the model before and after: a dict of its keyword arguments,
            a tuple of its positional arguments, or a function that gets the model and runs it. The model is restored
            if it was faster as it was, or if its error, compared with a run in float32, is now more than 1.1 times as
            large. Of a pipeline the denoiser (`transformer` or `unet`) is checked, and restored, alone.
        graphs: Also capture the forward of the model, or of a pipeline's denoisers, as CUDA graphs: at the second call
            with tensors of some shapes, to be replayed from then on. Calls that no graph can serve run as usual; the
            report counts them by reason. A model that the check restored has none. `generate` of a model of
            transformers then holds a static cache and captures whole decoding steps.
        scope: `"modules"` or `"model"`; the latter has no CUDA graphs. Its report grows as Torch traces.

    Returns:
        The replaced modules, the modules left and the reasons, and the figures of the check.

    Raises:
        TypeError: If `model` or `check` is of another type.
        ValueError: If a pipeline without a denoiser should be checked, if `scope` has another value, or if it is
            `"model"` together with `graphs`.
    """
    if scope not in ("modules", "model"):
        raise ValueError(f'blocks: scope must be "modules" or "model", not {scope!r}')
    if scope == "model" and graphs:
        raise ValueError('blocks: graphs=True needs scope="modules"')
    roots = _roots(model)
    checked = None if check is None else _root_to_check(model, check)
    if scope == "model":
        return _trace(roots, checked, check)
    for root in roots:
        untrace(root)
    report = Report()
    for root in roots:
        if root is checked:
            _accelerate_checked(root, check, graphs, report)
        else:
            _accelerate_root(root, report)
        if not graphs:
            _remove_graphs(root)
    if check is not None and checked is not None:
        _measure_shares(checked, check, report)
    rejected = checked if report.check is not None and report.check.kept == "eager" else None
    if graphs:
        report.graphs = add_graphs(model, but=rejected)
        report.generation = add_generation(model) if model is not rejected else {}
    report.notes += notes_on(roots)
    return report


def _trace(roots: list[nn.Module], checked: Optional[nn.Module], check: Optional[Check]) -> Report:
    report = Report()
    for root in roots:
        if not is_traced(root):
            _restore_root(root)
        report = trace(root, report)
    if checked is not None and check is not None:
        call = suspend(checked)
        report.check = compare(checked, check, lambda: resume(checked, call), lambda: suspend(checked))
        if report.check.kept == "eager":
            untrace(checked)
            for (name, _), number in report.replaced.items():
                report.left[name, _KEPT] += number
            report.replaced.clear()
    report.notes = notes_on(roots)
    return report


def restore(model: Any) -> None:
    """Undo `accelerate`: every module gets its own class and forward back.

    Raises:
        TypeError: If `model` is neither a `torch.nn.Module` nor a pipeline.
    """
    for root in _roots(model):
        _restore_root(root)


def _accelerate_root(root: nn.Module, report: Report) -> None:
    for module in root.modules():
        replacement = replacement_in(module) or _put_if_possible(module, report)
        if replacement is not None:
            name = original_class(module).__name__
            report.replaced[name, replacement.does] += 1
            report.kernels[name, replacement.does] = list(replacement.kernels)
            report.left.update((name, miss) for miss in replacement.misses)


def _put_if_possible(module: nn.Module, report: Report) -> Optional[Replacement]:
    """Replace a module and return its replacement, or report why it is left."""
    replacement, _ = find(module)
    reason = _reason_left(module)
    if reason is not None:
        report.left[type(module).__name__, reason] += 1
        return None
    if replacement is not None:
        put(module, replacement)
    return replacement


def _reason_left(module: nn.Module) -> Optional[str]:
    """Return why a module is left; None if it is replaced, or if no replacement is expected."""
    replacement, reason = find(module)
    # Called a norm, as `LayerNorm2d` and `RMSNormGated` are.
    if replacement is None and reason is None and re.search("[Nn]orm(?![a-z])", type(module).__name__):
        return reason_of_norm(module)
    return reason


def _accelerate_checked(root: nn.Module, check: Check, graphs: bool, report: Report) -> None:
    def accelerate_again() -> None:
        _accelerate_root(root, Report())
        if graphs:
            add_graphs(root)

    trial = Report()
    _restore_root(root)
    _accelerate_root(root, trial)
    if not trial.replaced:
        report.left += trial.left
        return
    _restore_root(root)
    report.check = compare(root, check, accelerate_again, lambda: _restore_root(root))
    slower = report.check.is_slower
    if not graphs and (slower or report.check.kept == "accelerated"):
        if slower:
            _accelerate_root(root, Report())
        if _take_out_slow(root, check, trial):
            kept = {module: replacement_in(module) for module in root.modules()}
            _restore_root(root)
            report.check = compare(root, check, lambda: _put_all(kept), lambda: _restore_root(root))
        elif slower:
            _restore_root(root)
    report.left += trial.left
    if report.check.kept == "accelerated":
        report.replaced += trial.replaced
        report.kernels.update(trial.kernels)
    else:
        for (name, _), number in trial.replaced.items():
            report.left[name, _KEPT] += number


def _put_all(replacements: Mapping[nn.Module, Optional[Replacement]]) -> None:
    for module, replacement in replacements.items():
        if replacement is not None:
            put(module, replacement)


def _take_out_slow(root: nn.Module, check: Check, trial: Report) -> bool:
    """Take out the replacements without which the model is faster, a class at a time. Return whether there were any."""
    groups: dict[tuple[str, str], list[nn.Module]] = {}
    for module in root.modules():
        replacement = replacement_in(module)
        if replacement is not None:
            groups.setdefault((original_class(module).__name__, replacement.does), []).append(module)
    slow = False
    for group, modules in groups.items() if len(groups) > 1 else ():
        replacements = [replacement_in(module) for module in modules]

        def put_again(modules: Any = modules, replacements: Any = replacements) -> None:
            for module, replacement in zip(modules, replacements):
                put(module, replacement)

        def take_out_all(modules: Any = modules) -> None:
            for module in modules:
                take_out(module)

        if is_faster_without(root, check, put_again, take_out_all):
            take_out_all()
            slow = True
            trial.left[group[0], _SLOWER] += trial.replaced.pop(group)
    return slow


def _measure_shares(root: nn.Module, check: Check, report: Report) -> None:
    left: dict[tuple[str, str], list[nn.Module]] = {}
    for module in root.modules():
        if replacement_in(module) is None:
            replacement, reason = find(module)
            taken_out = (_SLOWER, _KEPT, *replacement.misses) if replacement is not None and reason is None else ()
            for words in taken_out or (_reason_left(module),):
                if (type(module).__name__, words) in report.left:
                    left.setdefault((type(module).__name__, words), []).append(module)
    if left:
        report.shares = time_shares(root, check, left)


def _restore_root(root: nn.Module) -> None:
    untrace(root)
    _remove_graphs(root)
    for module in root.modules():
        take_out(module)


def _remove_graphs(root: nn.Module) -> None:
    for module in root.modules():
        remove_graphs(module)


def _roots(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    return [part for part in _components(model).values() if isinstance(part, nn.Module)]


def _components(pipeline: Any) -> Mapping[str, Any]:
    components = getattr(pipeline, "components", None)
    if not isinstance(components, dict):
        raise TypeError(f"blocks: model must be a torch.nn.Module or a pipeline, not {type(pipeline).__name__}")
    return components


def _root_to_check(model: Any, check: Check) -> nn.Module:
    if not (isinstance(check, (Mapping, tuple)) or callable(check)):
        raise TypeError(
            "blocks: check must be a dict of keyword arguments, a tuple of arguments or a function that runs the "
            f"model, not {type(check).__name__}"
        )
    if isinstance(model, nn.Module):
        return model
    components = _components(model)
    for name in ("transformer", "unet"):
        if isinstance(components.get(name), nn.Module):
            return components[name]
    raise ValueError(
        f"blocks: check needs a pipeline with a transformer or a unet, and this one has {', '.join(components)}; "
        "accelerate and check its models one by one"
    )
