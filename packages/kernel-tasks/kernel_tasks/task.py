"""Tasks: a reference, its inputs at several sizes, the rule for right results, and the form of an answer."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_format.errors import KernelBuilderError
from kernel_format.files import write_files

Sizes = Mapping[str, Any]
"""What distinguishes one workload of a task from another, such as names of sizes -> integers."""

Files = dict[str, bytes]
"""Relative path of a file -> its content."""

PROBLEM, CANDIDATE = "problem.py", "candidate.py"


class MachineError(KernelBuilderError):
    """This machine cannot run a task that may be valid, as without a GPU."""

    exit_code = 11


@dataclass(frozen=True)
class TaskSettings:
    """The settings of a task: of `task.toml`, or of the task's format."""

    dtypes: tuple[str, ...] = ()  # of inputs and parameters; empty for those of the file
    sizes: Sizes = field(default_factory=dict)  # to time, in place of the file's own
    shapes: tuple[Sizes, ...] = ()  # further sizes, checked and timed
    tolerance: float = 0.01  # of each element, absolute and relative
    backward: bool = False  # whether the gradients of inputs and parameters belong to the results
    device: str | None = None


@dataclass(frozen=True)
class Problem:
    """A task at one choice of sizes.

    `fault(arguments, results, expected)` is the format's own rule: it returns why the tensors of a result are wrong, or
    None. `arguments` are a call's, `expected` the tensors of the reference's result. With `may_overwrite` a candidate
    may write to its arguments, whether the reference does or not, and over results of earlier calls. With
    `decides_dtypes`, results of other dtypes than the reference's are for `fault` to accept.
    """

    Model: Any  # the class of a torch.nn.Module: the reference
    get_inputs: Callable[[], Any]  # the arguments of a call, from Torch's global generators
    get_init_inputs: Callable[[], Any] = list
    fault: Callable[[Any, Sequence[Any], Sequence[Any]], str | None] | None = None
    may_overwrite: bool = False
    decides_dtypes: bool = False


@dataclass
class Task:
    """A problem that a candidate solves. The digest is of the files that define it.

    Attributes:
        form: What a candidate is, for a prompt.
        workloads: The sizes that a format with fixed workloads has, those to time first; empty if sizes are free.
        timed: How many of them are to be timed.
        is_elementwise: Whether results are compared element by element, each with a tolerance.
        entry: The file that `read_task` reads; empty for the directory of the files.
    """

    name: str
    path: Path
    files: Files
    settings: TaskSettings = field(default_factory=TaskSettings)
    form: str = ""
    workloads: tuple[Sizes, ...] = ()
    timed: int = 0
    is_elementwise: bool = True
    entry: str = ""

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the task's files."""
        content = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in self.files.items())
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def sizes(self) -> dict[str, Any]:
        """Return the task's own sizes: those of its first workload, if it has workloads."""
        return dict(self.workloads[0]) if self.workloads else {}

    def weight(self, sizes: Sizes) -> int:
        """Return a number that grows with the work at these sizes: the largest size may be that of a square."""
        known = [size for name, size in sizes.items() if name != "seed" and type(size) is int and size > 0]
        return math.prod(known) * max(known, default=1)

    def problem(self, sizes: Sizes) -> Problem:
        """Return the problem at these sizes.

        Raises:
            ConfigError: If the task's code cannot be run.
            MachineError: If it cannot be run on this machine.
        """
        raise NotImplementedError

    def model_files(self, sizes: Sizes) -> Files:
        """Return a program whose `problem.py` defines `Model`, to run the reference in another process."""
        raise NotImplementedError

    def candidate_files(self, path: Path) -> Files | None:
        """Return a program whose `candidate.py` defines `ModelNew`, of a candidate in the format's own form.

        None if the format has no other form than a file that defines `ModelNew`.
        """
        return None

    def save(self, directory: Path) -> Path:
        """Write the task's files into a directory, and return the path with which `read_task` reads them."""
        target = directory if self.entry else directory / self.name
        write_files(target, self.files)
        return target / self.entry

    def description(self) -> list[str]:
        """Return the requirements of an answer, in sentences for a prompt."""
        settings = self.settings
        shapes = self.workloads[: max(self.timed, 1)] or [{**self.sizes(), **settings.sizes}, *settings.shapes]
        listed = "; ".join(
            ", ".join(f"{name}={value}" for name, value in sizes.items() if name != "uuid") for sizes in shapes[:8]
        )
        return [
            self.form,
            f"Dtypes of inputs and parameters: {', '.join(settings.dtypes) or 'as the task creates them'}.",
            f"Shapes: {listed or 'as the task creates them'}{'; and others' if len(shapes) > 8 else ''}.",
            f"Tolerance: {self.tolerance()}.",
            "The gradients of inputs and parameters are compared as well: the results must support the backward pass."
            if settings.backward
            else "Only the forward pass is computed.",
        ]

    def tolerance(self) -> str:
        """Return the rule for right results, for a prompt."""
        limit = self.settings.tolerance
        within = f"each element within {limit} min(1, max |expected|) + {limit} |expected| of the float64 result"
        return f"{within}, errors as small as eager's, and the reference's integers"
