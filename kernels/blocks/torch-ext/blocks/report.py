"""The report of `accelerate`."""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

import torch
from torch import nn

from . import kernel_set
from .comparison import Comparison
from .findings import Findings, GenerationCounts, GraphCounts
from .tested_versions import TESTED


def _modules(number: int) -> str:
    return f"{number} module" if number == 1 else f"{number} modules"


def _versions() -> dict[str, str]:
    versions = {name: str(version) for name, version in kernel_set.VERSIONS.items()}
    versions["torch"] = torch.__version__
    for library in (*TESTED, "peft", "accelerate"):
        version = _version_of(library)
        if version is not None:
            versions[library] = version
    return versions


def _version_of(library: str) -> Optional[str]:
    # A library that is not loaded has no modules in the model.
    return getattr(sys.modules.get(library), "__version__", None)


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _counts(counts: Any) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(counts).items()}


@dataclass
class Report(Findings):
    """A model's replaced modules, the modules left, and the reasons. `print(report)` shows it as a table.

    Attributes:
        replaced, left, kernels: The findings, which grow with every graph.
        notes: Further notices, a sentence each.
        versions: Of this package, its kernels, Torch, and the libraries that are loaded.
        graphs: By model: the counts of its CUDA graphs, which grow with every call.
        generation: By model: the counts of its `generate`, which grow with every call.
        check: Both models' times and errors, if `accelerate` was asked to check.
    """

    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=_versions)
    graphs: dict[str, GraphCounts] = field(default_factory=dict)
    generation: dict[str, GenerationCounts] = field(default_factory=dict)
    check: Optional[Comparison] = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as data that `json.dumps` takes."""
        return {
            "replaced": [
                {"class": name, "count": number, "does": does, "kernels": self.kernels.get((name, does), [])}
                for (name, does), number in self.replaced.items()
            ],
            "left": [
                {"class": name, "count": number, "reason": reason} for (name, reason), number in self.left.items()
            ],
            "notes": list(self.notes),
            "device": kernel_set.DEVICE,
            "versions": dict(self.versions),
            "graphs": {name: _counts(counts) for name, counts in self.graphs.items()},
            "generation": {name: _counts(counts) for name, counts in self.generation.items()},
            "check": None if self.check is None else asdict(self.check),
        }

    def __str__(self) -> str:
        replaced, left = sum(self.replaced.values()), sum(self.left.values())
        if replaced or left:
            lines = [f"{_modules(replaced)} replaced, {left} left as before; kernels for {kernel_set.DEVICE}"]
        else:
            lines = [f"nothing replaced so far, before the first trace; kernels for {kernel_set.DEVICE}"]
        width = max((len(name) for name, _ in [*self.replaced, *self.left]), default=0)
        for title, counts in (("replaced", self.replaced), ("left", self.left)):
            if counts:
                lines.append(f"{title}:")
            for (name, text), number in counts.items():
                kernels = self.kernels.get((name, text)) if counts is self.replaced else None
                by = f" ({', '.join(kernels)})" if kernels else ""
                lines.append(f"  {number:4} x {name:{width}}  {text}{by}")
        for name, graphs in self.graphs.items():
            lines += [f"graphs of {name}:", *(f"  {line}" for line in str(graphs).splitlines())]
        for name, steps in self.generation.items():
            lines += [f"generate of {name}:", *(f"  {line}" for line in str(steps).splitlines())]
        if self.check is not None:
            lines += ["check:", *(f"  {line}" for line in str(self.check).splitlines())]
        lines += [f"note: {note}" for note in self.notes]
        lines.append("versions: " + ", ".join(f"{name} {version}" for name, version in self.versions.items()))
        return "\n".join(lines)


def notes_on(roots: Iterable[nn.Module]) -> list[str]:
    """Return notices about accelerated models: their device and dtype, untested libraries."""
    notes = []
    roots = list(roots)
    devices = {tensor.device.type for root in roots for tensor in (*root.parameters(), *root.buffers())} - {"meta"}
    dtypes = {parameter.dtype for root in roots for parameter in root.parameters()}
    if devices and kernel_set.DEVICE not in devices:
        notes.append(
            f"the kernels are for {kernel_set.DEVICE}, and the model is on {', '.join(sorted(devices))}: "
            "there it runs as before"
        )
    if dtypes and not dtypes & {*kernel_set.DTYPES}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        notes.append(f"the model is in {names}, which the kernels do not take: it runs as before")
    for library, (oldest, newest) in TESTED.items():
        version = _version_of(library)
        if version is not None and _minor(version) > _minor(newest):
            notes.append(f"{library} {version} is newer than {newest}, the newest release that was tested")
        if version is not None and _minor(version) < _minor(oldest):
            notes.append(f"{library} {version} is older than {oldest}, the oldest release that was tested")
    return notes
