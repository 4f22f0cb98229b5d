"""Counts of the replaced operations of a model, and of those left, from its graphs."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from .fusions import KERNELS_OF
from .values import operation

# Operations that only norms have.
_STATISTICS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "mean", "var", "std", "rsqrt"}


@dataclass
class Findings:
    """Counts of modules, which grow with every graph.

    Attributes:
        replaced: By class of module and operation: the number of modules.
        left: By class of module and the reason: how many modules.
        kernels: By class of module and operation: the names of the kernels that it calls.
    """

    replaced: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: Counter[tuple[str, str]] = field(default_factory=Counter)
    kernels: dict[tuple[str, str], list[str]] = field(default_factory=dict)


class Tally:
    """Adds the operations of the graphs of one model, whose class is `cls`, to findings. Each module counts once."""

    def __init__(self, cls: type, findings: Findings) -> None:
        self._cls, self._findings = cls, findings
        self._counted: set[tuple[str, str, str]] = set()

    def add(self, graph: Graph, misses: Sequence[tuple[Node, str]]) -> None:
        """Add a graph, and the operations of it that a kernel almost computes."""
        for node in graph.nodes:
            kernel = KERNELS_OF.get(node.target) if node.op == "call_function" else None
            path, name = self._module_of(node)
            if kernel is not None:
                self._add_to(self._findings.replaced, path, name, kernel.does)
                self._findings.kernels[name, kernel.does] = list(kernel.names)
            elif operation(node) in _STATISTICS and re.search("[Nn]orm(?![a-z])", name):
                self._add_to(self._findings.left, path, name, "it computes no norm that a kernel does")
        for node, reason in misses:
            self._add_to(self._findings.left, *self._module_of(node), reason)

    def miss(self, reason: str) -> None:
        """Add a reason why the whole model is left."""
        self._add_to(self._findings.left, "", self._cls.__name__, reason)

    def _add_to(self, counts: Counter[tuple[str, str]], path: str, name: str, text: str) -> None:
        if (path, name, text) not in self._counted:
            self._counted.add((path, name, text))
            counts[name, text] += 1

    def _module_of(self, node: Node) -> tuple[str, str]:
        """Return the path and the class of the innermost module that a node belongs to."""
        path, cls = next(reversed((node.meta.get("nn_module_stack") or {"": ("", self._cls)}).values()))
        return path, cls.__name__ if isinstance(cls, type) else str(cls).rpartition(".")[2]
