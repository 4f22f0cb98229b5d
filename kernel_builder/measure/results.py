"""What a run measured, and how it is kept as JSON. Times are seconds."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kernel_builder.errors import ConfigError
from kernel_builder.measure.statistics import Estimate

OURS = "ours"
COPY = "copy"
EAGER = "eager"
COMPILE = "compile"


class Error(NamedTuple):
    """How far a tensor is from what it would be without rounding."""

    mean: float
    """The norm of the error beside that of the tensor."""
    most: float
    """The largest error of an element, in units of the dtype's precision at the largest element."""


class Place(NamedTuple):
    """What one row is about: an operation, a pass of it, a shape and a dtype."""

    operation: str
    passes: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.operation}, {self.passes}, {self.dtype}, {shape_name(self.shape)}"


def shape_name(shape: Iterable[int]) -> str:
    """A shape as tables and `--shapes` write it: `1x4096x2048`."""
    return "x".join(map(str, shape))


@dataclass
class Row:
    """What was measured at a place, by the names of implementations."""

    place: Place
    bytes: int = 0
    """What a call must read and write."""
    sets: int = 0
    """How many sets of tensors the calls took in turn."""
    errors: dict[str, list[Error]] = field(default_factory=dict)
    """Of each result."""
    faults: dict[str, str] = field(default_factory=dict)
    """Why an implementation has no times: what is wrong with its result, or its exception."""
    methods: dict[str, str] = field(default_factory=dict)
    """How each was timed."""
    times: dict[str, Estimate] = field(default_factory=dict)
    """Of one call."""
    shares: dict[str, Estimate] = field(default_factory=dict)
    """The time of a copy of as many bytes beside that of a call, in the same rounds."""
    ratios: dict[str, Estimate] = field(default_factory=dict)
    """The time of a call beside that of the kernel's, in the same rounds."""

    def best_peer(self) -> tuple[str, Estimate] | None:
        """The fastest peer, and its time beside the kernel's."""
        peers = {name: ratio for name, ratio in self.ratios.items() if name not in (OURS, COPY)}
        return min(peers.items(), key=lambda item: item[1].median, default=None)


@dataclass
class Host:
    """What one call costs the host, at a shape where the device has next to nothing to do."""

    place: Place
    times: dict[str, Estimate] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


@dataclass
class Report:
    """A run of `kernel-builder benchmark`."""

    kernel: str
    variant: str
    build: Mapping[str, Any]
    """The build's identifier, and where its sources come from, as its metadata has them."""
    device: str
    command: str
    date: str
    machine: Mapping[str, Any]
    rounds: int
    absent: dict[str, str] = field(default_factory=dict)
    """Why a peer could not be measured at all."""
    rows: list[Row] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)

    def wrong(self) -> list[Row]:
        """Rows where the kernel's own result is wrong."""
        return [row for row in self.rows if OURS in row.faults]

    def save(self, path: Path) -> None:
        """Writes the report; a reader finds the old file or the new one, whole."""
        document = dataclasses.asdict(self)
        for part in (*document["rows"], *document["hosts"]):
            part.update(part.pop("place")._asdict())
            for times in ("times", "shares", "ratios"):
                if times in part:
                    part[times] = {name: [_short(value) for value in one] for name, one in part[times].items()}
            if "errors" in part:
                part["errors"] = {name: [[_short(v) for v in one] for one in e] for name, e in part["errors"].items()}
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        staged.write_text(_json(document) + "\n", encoding="utf-8")
        staged.replace(path)

    @staticmethod
    def read(path: Path) -> Report:
        """Reads what `save` wrote.

        Raises:
            ConfigError: If it is not such a file.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            rows = [_row(entry) for entry in document.pop("rows")]
            hosts = [_host(entry) for entry in document.pop("hosts")]
            return Report(**document, rows=rows, hosts=hosts)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"is not a result of `kernel-builder benchmark --json`: {error}", where=str(path)
            ) from error


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers, of which there is at least one."""
    return statistics.geometric_mean(values)


def _place(entry: dict[str, Any]) -> Place:
    return Place(entry.pop("operation"), entry.pop("passes"), tuple(entry.pop("shape")), entry.pop("dtype"))


def _estimates(entry: Mapping[str, Any]) -> dict[str, Estimate]:
    return {name: Estimate(*values) for name, values in entry.items()}


def _row(entry: dict[str, Any]) -> Row:
    place = _place(entry)
    errors = {name: [Error(*one) for one in each] for name, each in entry.pop("errors").items()}
    times, shares, ratios = (_estimates(entry.pop(name)) for name in ("times", "shares", "ratios"))
    return Row(place, errors=errors, times=times, shares=shares, ratios=ratios, **entry)


def _host(entry: dict[str, Any]) -> Host:
    place = _place(entry)
    return Host(place, times=_estimates(entry.pop("times")), **entry)


def _short(value: float) -> float:
    """Four significant digits, more than any measurement has."""
    return float(f"{value:.4g}")


def _json(document: Mapping[str, Any]) -> str:
    """JSON with one line for each list of numbers, so that a diff of two runs can be read."""
    text = json.dumps(document, indent=1)
    return re.sub(r"\[\s+([^\[\]{}\"]*?)\s+\]", lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", text)
