"""The report of `accelerate`: replaced operations, those left, and the counts of CUDA graphs. It grows with each."""

import copy
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from torch import nn
from torch.fx import Graph, Node

from . import kernel_set
from .comparison import Comparison
from .fusions import KERNELS_OF
from .matching import operation

_LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate")
_PACKAGES = dict(KERNELS_OF.values())  # by operation
# Operations that only norms have.
_STATISTICS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "mean", "var", "std", "rsqrt"}


@dataclass
class GraphCounts:
    """Counts of one model's CUDA graphs so far: of its forward, or of the steps of its `generate`."""

    captured: int = 0
    held: int = 0  # graphs that are ready now
    replays: int = 0  # calls, or steps
    memory: int = 0  # bytes of the GPU's, with inputs, caches and buffers
    note: Optional[str] = None  # why no graph can be captured as the model is now
    eager: Counter[str] = field(default_factory=Counter)  # calls without graphs, by reason
    eager_steps: Counter[str] = field(default_factory=Counter)  # steps without a graph, by reason
    by_hand: Counter[str] = field(default_factory=Counter)  # calls whose tokens are chosen outside of it, by reason
    generated: int = 0  # calls of `generate` with this package's loop

    def __str__(self) -> str:
        first = f"{self.captured} captured, {self.held} held in {self.memory / 2**20:.0f} MiB, {self.replays} replays"
        lines = [first if self.note is None else f"{first}; none can be captured now: {self.note}"]
        for name, reasons in (("eager", self.eager), ("eager steps", self.eager_steps), ("by hand", self.by_hand)):
            lines += (f"{number:6} x {name}: {reason}" for reason, number in reasons.items())
        return "\n".join(lines)


def _versions() -> dict[str, str]:
    loaded = {library: getattr(sys.modules.get(library), "__version__", None) for library in _LIBRARIES}
    return kernel_set.VERSIONS | {library: str(version) for library, version in loaded.items() if version is not None}


@dataclass(repr=False, eq=False)
class Report:
    """A model's replaced modules, the modules left, and the reasons: a table by `print(report)` and in notebooks."""

    parts: Sequence["Report"] = ()  # of a pipeline: the reports of its models
    notes: list[str] = field(default_factory=list)  # further notices, a sentence each
    checks: list[str] = field(default_factory=list)  # the results of `check=True`, a line for each graph
    versions: dict[str, str] = field(default_factory=_versions)  # of this package, its kernels, and loaded libraries
    # By model: the counts of its CUDA graphs, and of its `generate`, which grow with every call.
    graphs: dict[str, GraphCounts] = field(default_factory=dict)
    generation: dict[str, GraphCounts] = field(default_factory=dict)
    check: Optional[Comparison] = None  # if `accelerate` was asked to check
    _replaced: Counter[tuple[str, str]] = field(default_factory=Counter)
    _left: Counter[tuple[str, str]] = field(default_factory=Counter)
    _counted: set[tuple[str, ...]] = field(default_factory=set)

    @property  # by class of module, and operation or reason: the number of modules
    def replaced(self) -> Counter[tuple[str, str]]:
        return sum((part.replaced for part in self.parts), self._replaced)

    @property
    def left(self) -> Counter[tuple[str, str]]:
        return sum((part.left for part in self.parts), self._left)

    def add(self, graph: Graph, misses: Sequence[tuple[Node, str]], cls: type, owner: str = "") -> None:
        """Add a graph of a `cls`, and misses. Modules count once; `owner` sets those of equal paths apart."""
        found = [(self.left, node, reason) for node, reason in misses]
        for node in graph.nodes:
            if node.op == "call_function" and node.target in KERNELS_OF:
                found.append((self.replaced, node, KERNELS_OF[node.target][0]))
            elif operation(node) in _STATISTICS and re.search("[Nn]orm(?![a-z])", _module_of(node, cls)[1]):
                found.append((self.left, node, "no kernel computes this norm"))
        for counts, node, text in found:
            path, name = _module_of(node, cls)
            if (owner + path, name, text) not in self._counted:
                self._counted.add((owner + path, name, text))
                counts[name, text] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the report as data that `json.dumps` takes."""
        return {
            "replaced": [
                {"class": name, "count": number, "does": does, "kernels": [_PACKAGES[does]]}
                for (name, does), number in self.replaced.items()
            ],
            "left": [{"class": name, "count": number, "reason": why} for (name, why), number in self.left.items()],
            "notes": [*self.notes, *(note for report in (self, *self.parts) for note in report.checks)],
            "device": kernel_set.DEVICE,
            "versions": dict(self.versions),
            "graphs": {name: copy.deepcopy(vars(counts)) for name, counts in self.graphs.items()},
            "generation": {name: copy.deepcopy(vars(counts)) for name, counts in self.generation.items()},
            "check": None if self.check is None else asdict(self.check),
        }

    def __str__(self) -> str:
        replaced, left, device = sum(self.replaced.values()), sum(self.left.values()), kernel_set.DEVICE
        lines = [f"{replaced} module{'s' * (replaced != 1)} replaced, {left} left as before; kernels for {device}"]
        if not replaced and not left:
            lines = [f"nothing replaced so far: Torch has traced no call; kernels for {device}"]
        width = max((len(name) for name, _ in [*self.replaced, *self.left]), default=0)
        for title, counts in (("replaced", self.replaced), ("left", self.left)):
            lines += [f"{title}:"] if counts else []
            for (name, text), number in counts.items():
                by = f" ({_PACKAGES[text]})" if title == "replaced" and text in _PACKAGES else ""
                lines.append(f"  {number:4} x {name:{width}}  {text}{by}")
        parts: dict[str, Any] = {f"graphs of {name}": counts for name, counts in self.graphs.items()}
        parts |= {f"generate of {name}": counts for name, counts in self.generation.items()}
        parts |= {} if self.check is None else {"check": self.check}
        for title, part in parts.items():
            lines += [f"{title}:", *(f"  {line}" for line in str(part).splitlines())]
        lines += [f"note: {note}" for note in self.to_dict()["notes"]]
        lines.append("versions: " + ", ".join(f"{name} {version}" for name, version in self.versions.items()))
        return "\n".join(lines)

    __repr__ = __str__  # for notebooks


def _module_of(node: Node, cls: type) -> tuple[str, str]:
    """Return the path and the class of the innermost module that a node belongs to."""
    path, owner = next(reversed((node.meta.get("nn_module_stack") or {"": ("", cls)}).values()))
    return path, owner.__name__ if isinstance(owner, type) else str(owner).rpartition(".")[2]


def notes_on(roots: Iterable[nn.Module]) -> list[str]:
    """Return notices about the device and the dtype of accelerated models."""
    tensors = [tensor for root in roots for tensor in (*root.parameters(), *root.buffers())]
    devices = ", ".join(sorted({tensor.device.type for tensor in tensors} - {"meta"}))
    dtypes = {tensor.dtype for tensor in tensors if isinstance(tensor, nn.Parameter)}
    notes = []
    if devices and kernel_set.DEVICE not in devices:
        notes.append(f"the kernels are for {kernel_set.DEVICE}, and the model is on {devices}: it runs without them")
    if dtypes and not dtypes & {*kernel_set.DTYPES}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        notes.append(f"the model is in {names}, which the kernels do not support: it runs without them")
    return notes
