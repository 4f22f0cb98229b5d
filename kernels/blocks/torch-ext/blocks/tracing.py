"""Whole models by Dynamo: Torch traces the forward, and the kernels take the place of operations in its graph.

`torch.compile` calls the back end with a graph of Torch's own calls, and guards it: the graph runs only while inputs,
modules, hooks, modes and global names are as they were when it was traced. Inductor has no part in it: the graph's
calls run one by one, without the Python of the model around them.
"""

import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch.compiler import is_compiling
from torch.fx import Graph, GraphModule, Node

from .fusions import KERNELS_OF, fuse
from .kernel_set import DEVICE, is_forward_mode, is_transformed
from .report import Report
from .values import operation

# Operations that only norms have.
_STATISTICS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "mean", "var", "std", "rsqrt"}

# Reports, which the back ends fill. No value may refer to its model.
_reports: "weakref.WeakKeyDictionary[nn.Module, Report]" = weakref.WeakKeyDictionary()


def trace(model: nn.Module, report: Report) -> Report:
    """Let a model run by graphs with the kernels, from its next call on. Return the report, which each graph adds to.

    A model that is traced already keeps its graphs and its report.
    """
    if model in _reports:
        return _reports[model]
    own = model._call_impl

    def traced(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    # Torch counts the graphs of a code object, up to 8: each model has one of its own.
    traced.__code__ = traced.__code__.replace()
    compiled = torch.compile(traced, backend=_Backend(type(model).__name__, report))

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # who compiles the model gets its own operations, which Inductor fuses
            return own(*args, **kwargs)
        with dynamo_config.patch(skip_nnmodule_hook_guards=False):  # hooks may be added after the trace
            return compiled(*args, **kwargs)

    resume(model, call)
    _reports[model] = report
    return report


def is_traced(model: nn.Module) -> bool:
    return model in _reports


def suspend(model: nn.Module) -> Any:
    """Let a model run as it was, and return the call that runs its graphs."""
    call = model._compiled_call_impl
    model._compiled_call_impl = None  # Torch has no public name to undo `nn.Module.compile`
    return call


def resume(model: nn.Module, call: Any) -> None:
    model._compiled_call_impl = call


def untrace(model: nn.Module) -> None:
    """Undo `trace`."""
    if _reports.pop(model, None) is not None:
        suspend(model)


class _Backend:
    """The function that `torch.compile` calls with each graph of one model."""

    def __init__(self, name: str, report: Report) -> None:
        self._name, self._report = name, report
        self._breaks = dict(counters["graph_break"])
        self._counted: set[tuple[str, str, str]] = set()  # a second graph of a module counts once

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._add_breaks()
        if torch.is_autocast_enabled(DEVICE):  # it changes the dtypes of the model's own operations
            return module.forward
        own = GraphModule(module, _copied(module.graph))
        for part in module.modules():  # the others are the bodies of checkpoints and the like
            if isinstance(part, GraphModule):
                self._count(part.graph, fuse(part))

        def run(*args: Any) -> Any:
            # The kernels have no forward mode, and their formulas for transforms are the model's own operations.
            return (own if is_forward_mode() or is_transformed() else module).forward(*args)

        return run

    def _add_breaks(self) -> None:
        for reason, number in counters["graph_break"].items():
            if number > self._breaks.get(reason, 0):
                title = reason.strip().partition("\n")[0]
                self._report.left["graph break", title] += number - self._breaks.get(reason, 0)
        self._breaks = dict(counters["graph_break"])

    def _count(self, graph: Graph, misses: Sequence[tuple[Node, str]]) -> None:
        for node in graph.nodes:
            kernel = KERNELS_OF.get(node.target) if node.op == "call_function" else None
            path, name = self._module_of(node)
            if kernel is not None:
                self._add_to(self._report.replaced, path, name, kernel.does)
                self._report.kernels[name, kernel.does] = list(kernel.names)
            elif operation(node) in _STATISTICS and re.search("[Nn]orm(?![a-z])", name):
                self._add_to(self._report.left, path, name, "it computes no norm that a kernel does")
        for node, reason in misses:
            self._add_to(self._report.left, *self._module_of(node), reason)

    def _add_to(self, counts: Counter[tuple[str, str]], path: str, name: str, text: str) -> None:
        if (path, name, text) not in self._counted:
            self._counted.add((path, name, text))
            counts[name, text] += 1

    def _module_of(self, node: Node) -> tuple[str, str]:
        """Return the path and the class of the innermost module that a node belongs to."""
        path, cls = next(reversed((node.meta.get("nn_module_stack") or {"": ("", self._name)}).values()))
        return path, cls.__name__ if isinstance(cls, type) else str(cls).rpartition(".")[2]


def _copied(graph: Graph) -> Graph:
    copy = Graph()
    values: dict[Node, Node] = {}
    copy.output(copy.graph_copy(graph, values))
    return copy
