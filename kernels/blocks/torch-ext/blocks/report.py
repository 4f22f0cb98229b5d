"""What `accelerate` did to a model."""

from collections import Counter
from dataclasses import dataclass, field

from .graphs import GraphCounts


@dataclass
class Report:
    """What was replaced in a model, and what was left, and why. `print(report)` shows it as a table.

    Attributes:
        replaced: By class of module and what its replacement does: how many modules.
        left: By class of module and the reason: how many modules.
        graphs: By model: what its CUDA graphs have done. The counts go on with every call.
    """

    replaced: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: Counter[tuple[str, str]] = field(default_factory=Counter)
    graphs: dict[str, GraphCounts] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{sum(self.replaced.values())} modules replaced, {sum(self.left.values())} left"]
        if not self.replaced and not self.left:
            lines = ["nothing replaced: the model has no module that the kernels know"]
        for title, counts in (("replaced", self.replaced), ("left", self.left)):
            lines += [f"  {title:8}  {number:4} x {name}: {words}" for (name, words), number in counts.items()]
        for name, counts in self.graphs.items():
            lines += [f"  graphs    {name}: {counts}".replace("\n", "\n            ")]
        return "\n".join(lines)
