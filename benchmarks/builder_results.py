"""The builder's figures as rows of a table, with their targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A figure's row in a table.

    Attributes:
        target: Empty if the figure has none.
        met: Whether the measured value meets the target; None if nothing was measured.
        note: An explanation of the figure, printed beside its commands.
    """

    title: str
    target: str
    measured: str
    met: bool | None = True
    note: str = ""

    @property
    def verdict(self) -> str:
        """Return `met`, `missed` or `not measured`, or `-` if there is no target."""
        if not self.target:
            return "-"
        return {True: "met", False: "missed", None: "not measured"}[self.met]


def builder_rows(figures: Mapping[str, Any]) -> dict[str, Row]:
    """Return the name of each measured figure with its row, in the order of benchmarks/builder.py."""
    return {name: _ROWS[name](figure["values"]) for name, figure in figures.items()}


def _downloads(values: Mapping[str, Any]) -> Row:
    return Row(
        "download for all `cuda`, `cpu` and `rocm` variants of a stable-ABI project, with an empty cache",
        "at most 160 MB",
        f"{values['bytes'] / 1e6:.1f} MB",
        values["bytes"] <= 160e6,
        "An index on loopback, which forwards to the configured index, counts all bytes, including index pages. "
        f"`--all` also downloads the compiler of CUDA 13.2, another {values['more-with-all'] / 1e6:.1f} MB.",
    )


def _further_torch(values: Mapping[str, Any]) -> Row:
    links, bindings, others = _split(values["steps"])
    return Row(
        "steps for one more Torch release, for a project on the full C++ ABI",
        "for each back end: the binding's compile and the link",
        f"{len(bindings) + len(others)} compiles, {len(links)} links",
        len(bindings) == 2 and not others,
        "The project is tests/projects/full-scale. Its device code does not include Torch's headers.",
    )


def _nothing_changed(values: Mapping[str, Any]) -> Row:
    seconds = values["seconds"]
    return Row(
        "wall time of `kernel-builder build` without changes",
        "at most 0.5 s",
        f"{seconds['median']:.2f} s",
        seconds["median"] <= 0.5,
        f"Median of {seconds['n']} processes, startup included.",
    )


def _one_source(values: Mapping[str, Any]) -> Row:
    links, bindings, others = _split(values["steps"])
    # The binding is compiled again if it names the op namespace, which is a hash of all sources.
    return Row(
        "steps after a change to one source",
        "its compile, the binding's compile, and the link",
        f"{len(values['steps'])} steps: {', '.join(values['steps'])}",
        len(links) == 1 and len(bindings) <= 1 and len(others) == 1,
        "A comment is added to the last CUDA source of rmsnorm.",
    )


def _split(steps: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the links, the compiles of bindings, and the other compiles."""
    links = [step for step in steps if step.startswith("link ")]
    bindings = [step for step in steps if "/torch_binding.cpp " in step]
    return links, bindings, [step for step in steps if step not in links + bindings]


def _warm_cache(values: Mapping[str, Any]) -> Row:
    warm, cold = values["warm-cpu-seconds"], values["cold-cpu-seconds"]
    return Row(
        "CPU time in a clean checkout with a warm cache / of the cold build",
        "at most 10%",
        f"{warm / cold:.1%}: {warm:.1f} s of {cold:.1f} s",
        warm <= 0.1 * cold,
        "The remaining time assembles, checks and loads the packages.",
    )


def _load_time(values: Mapping[str, Any]) -> Row:
    median = values["milliseconds"]["median"]
    return Row(
        "wall time of `get_local_kernel` for a CPU variant, after `import torch` and `import kernels`",
        "at most 50 ms",
        f"{median:.0f} ms; {values['second-milliseconds']['median']:.1f} ms for the second call",
        median <= 50,
        f"Median of {values['milliseconds']['n']} processes.",
    )


def _triton(values: Mapping[str, Any]) -> Row:
    return Row(
        f"build of {values['kernels']} Triton kernels ahead of time, for {values['capabilities']} capabilities",
        "at most 120 s",
        f"{values['seconds']:.0f} s, {values['cpu-seconds']:.0f} s of CPU time",
        values["seconds"] <= 120,
        "The kernels are those of examples/triton; the compilers are cached.",
    )


_ROWS = {
    "downloads": _downloads,
    "further-torch": _further_torch,
    "nothing-changed": _nothing_changed,
    "one-source": _one_source,
    "warm-cache": _warm_cache,
    "load-time": _load_time,
    "triton": _triton,
}
