"""Counts of the replaced operations of a model, and of those left, from its graphs."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

from torch.fx import Graph, Node

from .fusions import KERNELS_OF
from .values import operation

# Operations that only norms have.
_STATISTICS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "mean", "var", "std", "rsqrt"}


@dataclass
class Counts:
    """Counts of one model's CUDA graphs so far.

    Attributes:
        captured: Graphs captured.
        eager: Calls without graphs, by reason.
        memory: Bytes of GPU memory that the graphs hold, with their inputs, caches and buffers.
        note: Why no graph can be captured as the model is now, or None.
    """

    captured: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    memory: int = 0
    note: Optional[str] = None

    def _text(self, first: str, *others: tuple[str, Counter[str]]) -> str:
        text = f"{first}; none can be captured now: {self.note}" if self.note is not None else first
        lines = (f"{number:6} {of}: {reason}" for of, counts in others for reason, number in counts.items())
        return "\n".join([text, *lines])


@dataclass
class GraphCounts(Counts):
    """Counts of the graphs of a model's forward.

    Attributes:
        held: Graphs that are ready now.
        replays: Calls that replayed a graph.
    """

    held: int = 0
    replays: int = 0

    def __str__(self) -> str:
        held = f"{self.held} held in {self.memory / 2**20:.0f} MiB"
        return self._text(f"{self.captured} captured, {held}, {self.replays} replays", ("x eager", self.eager))


@dataclass
class GenerationCounts(Counts):
    """Counts of the graphs of decoding steps in `generate`.

    Attributes:
        calls: Calls with this package's loop.
        steps: Decoding steps that replayed a graph.
        eager_steps: Steps that ran without a graph, by reason.
        by_hand: Calls whose tokens were chosen outside of the graph, step by step, by reason.
    """

    calls: int = 0
    steps: int = 0
    eager_steps: Counter[str] = field(default_factory=Counter)
    by_hand: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        counts = f"{self.calls} calls with a static cache, {self.captured} steps captured, {self.steps} replays"
        return self._text(
            f"{counts}, {self.memory / 2**20:.0f} MiB held",
            ("steps eager", self.eager_steps),
            ("calls step by step", self.by_hand),
            ("calls as before", self.eager),
        )


@dataclass
class Findings:
    """Counts of modules, which grow with every graph.

    Attributes:
        replaced: By class of module and operation: the number of modules.
        left: By class of module and the reason: how many modules.
    """

    replaced: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: Counter[tuple[str, str]] = field(default_factory=Counter)
    _counted: set[tuple[str, ...]] = field(default_factory=set, repr=False)

    def add(self, graph: Graph, misses: Sequence[tuple[Node, str]], cls: type, owner: str = "") -> None:
        """Add a graph of a module of class `cls`, and the operations of it that a kernel almost computes.

        Each module counts once. `owner` sets the modules of graphs apart whose paths are equal.
        """
        for node in graph.nodes:
            kernel = KERNELS_OF.get(node.target) if node.op == "call_function" else None
            path, name = _module_of(node, cls)
            if kernel is not None:
                self._add_to(self.replaced, owner + path, name, kernel[0])
            elif operation(node) in _STATISTICS and re.search("[Nn]orm(?![a-z])", name):
                self._add_to(self.left, owner + path, name, "it computes no norm that a kernel does")
        for node, reason in misses:
            path, name = _module_of(node, cls)
            self._add_to(self.left, owner + path, name, reason)

    def _add_to(self, counts: Counter[tuple[str, str]], path: str, name: str, text: str) -> None:
        if (path, name, text) not in self._counted:
            self._counted.add((path, name, text))
            counts[name, text] += 1


def _module_of(node: Node, cls: type) -> tuple[str, str]:
    """Return the path and the class of the innermost module that a node belongs to."""
    path, owner = next(reversed((node.meta.get("nn_module_stack") or {"": ("", cls)}).values()))
    return path, owner.__name__ if isinstance(owner, type) else str(owner).rpartition(".")[2]
