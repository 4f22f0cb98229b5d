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
from .fusions import KERNELS_OF
from .tested_versions import TESTED

_PACKAGES = dict(KERNELS_OF.values())  # by operation


def _versions() -> dict[str, str]:
    versions = {**kernel_set.VERSIONS, "torch": torch.__version__}
    versions |= {library: _version_of(library) for library in (*TESTED, "peft", "accelerate")}
    return {name: str(version) for name, version in versions.items() if version is not None}


def _version_of(library: str) -> Optional[str]:
    # A library that is not loaded has no modules in the model.
    return getattr(sys.modules.get(library), "__version__", None)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _counts(counts: Any) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(counts).items()}


@dataclass
class Report(Findings):
    """A model's replaced modules, the modules left, and the reasons. `print(report)` shows it as a table.

    Attributes:
        replaced, left: The findings, which grow with every graph.
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
                {"class": name, "count": number, "does": does, "kernels": [_PACKAGES[does]]}
                for (name, does), number in self.replaced.items()
            ],
            "left": [{"class": name, "count": number, "reason": why} for (name, why), number in self.left.items()],
            "notes": list(self.notes),
            "device": kernel_set.DEVICE,
            "versions": dict(self.versions),
            "graphs": {name: _counts(counts) for name, counts in self.graphs.items()},
            "generation": {name: _counts(counts) for name, counts in self.generation.items()},
            "check": None if self.check is None else asdict(self.check),
        }

    def __str__(self) -> str:
        replaced, left, device = sum(self.replaced.values()), sum(self.left.values()), kernel_set.DEVICE
        lines = [f"{replaced} module{'s' * (replaced != 1)} replaced, {left} left as before; kernels for {device}"]
        if not replaced and not left:
            lines = [f"nothing replaced so far, before the first trace; kernels for {device}"]
        width = max((len(name) for name, _ in [*self.replaced, *self.left]), default=0)
        for title, counts in (("replaced", self.replaced), ("left", self.left)):
            lines += [f"{title}:"] if counts else []
            for (name, text), number in counts.items():
                by = f" ({_PACKAGES[text]})" if counts is self.replaced and text in _PACKAGES else ""
                lines.append(f"  {number:4} x {name:{width}}  {text}{by}")
        parts: list[tuple[str, Any]] = [(f"graphs of {name}", counts) for name, counts in self.graphs.items()]
        parts += [(f"generate of {name}", counts) for name, counts in self.generation.items()]
        parts += [("check", self.check)] if self.check is not None else []
        for title, part in parts:
            lines += [f"{title}:", *(f"  {line}" for line in str(part).splitlines())]
        lines += [f"note: {note}" for note in self.notes]
        lines.append("versions: " + ", ".join(f"{name} {version}" for name, version in self.versions.items()))
        return "\n".join(lines)


def notes_on(roots: Iterable[nn.Module]) -> list[str]:
    """Return notices about accelerated models: their device and dtype, untested libraries."""
    tensors = [tensor for root in roots for tensor in (*root.parameters(), *root.buffers())]
    devices = sorted({tensor.device.type for tensor in tensors} - {"meta"})
    dtypes = {tensor.dtype for tensor in tensors if isinstance(tensor, nn.Parameter)}
    notes = []
    if devices and kernel_set.DEVICE not in devices:
        of = ", ".join(devices)
        notes.append(f"the kernels are for {kernel_set.DEVICE}, and the model is on {of}: there it runs as before")
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
