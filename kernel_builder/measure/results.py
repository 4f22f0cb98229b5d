"""The result of a benchmark run, and its JSON form. All times are in seconds, all sizes in bytes."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kernel_format.errors import ConfigError
from kernel_format.files import write_atomically


class Estimate(NamedTuple):
    """A median, and an interval that contains the true median with at least 95 % confidence."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Half the width of the interval, as a share of the median."""
        return (self.high - self.low) / self.median / 2


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median of the samples and its interval, in the unit of the samples.

    The interval is taken from order statistics, so it assumes no distribution. With fewer than six samples no interval
    reaches 95 %, and the whole range is returned.
    """
    ordered = sorted(samples)
    rank = _rank(len(ordered))
    return Estimate(statistics.median(ordered), ordered[rank], ordered[-1 - rank])


def _rank(number: int) -> int:
    """Return the largest rank whose order statistic exceeds the true median with a probability of at most 2.5 %."""
    below, rank = 0.0, 0
    for successes in range(number // 2):
        below += math.comb(number, successes) / 2**number
        if below > 0.025:
            break
        rank = successes
    return rank


OURS = "ours"
COPY = "copy"
EAGER = "eager"
COMPILE = "compile"
# Measured with every host overhead, so that runs on different hosts can be compared.
YARDSTICK = "F.rms_norm"


class Deviation(NamedTuple):
    """How far a tensor is from its float64 reference."""

    relative: float
    """The L2 norm of the error, divided by the L2 norm of the reference."""
    ulps: float
    """The largest error of an element, in units in the last place of the reference's largest element."""


class Point(NamedTuple):
    """One point of a benchmark: an operation, a pass, a shape and a dtype."""

    operation: str
    passes: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.operation}, {self.passes}, {self.dtype}, {shape_name(self.shape)}"


def shape_name(shape: Iterable[int]) -> str:
    """Return a shape as tables and `--shapes` write it, for example `1x4096x2048`."""
    return "x".join(map(str, shape))


@dataclass
class Row:
    """The device times measured at one point; dictionaries have the names of implementations as keys."""

    point: Point
    bytes: int = 0
    """Bytes that a call must read and write."""
    sets: int = 0
    """Number of sets of tensors that the calls cycle through."""
    errors: dict[str, list[Deviation]] = field(default_factory=dict)
    """The deviation of each result."""
    faults: dict[str, str] = field(default_factory=dict)
    """Why an implementation has no time: the fault of its result, or its exception."""
    methods: dict[str, str] = field(default_factory=dict)
    """How it was timed: `graph`, `events` or `wall clock`."""
    times: dict[str, Estimate] = field(default_factory=dict)
    """Seconds of one call."""
    shares: dict[str, Estimate] = field(default_factory=dict)
    """Share of copy speed: the time of a copy of the same number of bytes, divided by the call's, per round."""
    ratios: dict[str, Estimate] = field(default_factory=dict)
    """The time of a call divided by the kernel's, per round."""

    def best_peer(self) -> tuple[str, Estimate] | None:
        """Return the fastest peer and its time divided by the kernel's; None without peers."""
        peers = {name: ratio for name, ratio in self.ratios.items() if name not in (OURS, COPY)}
        return min(peers.items(), key=lambda item: item[1].median, default=None)


@dataclass
class HostOverhead:
    """Host overhead: CPU seconds of one call, launch included, at a shape with almost no work for the device."""

    point: Point
    times: dict[str, Estimate] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    def relative(self, unit: str) -> float | None:
        """Return the kernel's host overhead divided by that of `unit`, if both were measured."""
        if OURS not in self.times or unit not in self.times:
            return None
        return self.times[OURS].median / self.times[unit].median


@dataclass
class BenchmarkReport:
    """The result of one run of `kernel-builder benchmark`."""

    kernel: str
    variant: str
    build: Mapping[str, Any]
    """The package's `id`, its size in `bytes`, and the `commit` of its sources (`-dirty` if they had changes)."""
    device: str
    command: str
    date: str
    machine: Mapping[str, Any]
    rounds: int
    absent: dict[str, str] = field(default_factory=dict)
    """Peer -> why it could not be measured at all."""
    rows: list[Row] = field(default_factory=list)
    hosts: list[HostOverhead] = field(default_factory=list)

    def wrong(self) -> list[Row]:
        """Return the rows in which the kernel's own result is wrong."""
        return [row for row in self.rows if OURS in row.faults]

    def save(self, path: Path) -> None:
        """Write the report as JSON, atomically."""
        lists = {name: [_entry(measured) for measured in getattr(self, name)] for name in ("rows", "hosts")}
        write_atomically(path, as_json(_rounded({**vars(self), **lists})))

    @staticmethod
    def read(path: Path) -> BenchmarkReport:
        """Read a report that `save` wrote."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            rows = [Row(**_fields(entry)) for entry in document.pop("rows")]
            hosts = [HostOverhead(**_fields(entry)) for entry in document.pop("hosts")]
            return BenchmarkReport(**document, rows=rows, hosts=hosts)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"is not a result of `kernel-builder benchmark --json`: {error}", where=str(path)
            ) from error


def as_json(document: Mapping[str, Any]) -> str:
    """Format results as JSON, each object of a list on one line: a diff of two runs shows the points that differ."""

    def formatted(value: Any) -> str:
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        return json.dumps(value, indent=1).replace("\n", "\n ") if isinstance(value, dict) else json.dumps(value)

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {formatted(value)}" for key, value in document.items()) + "\n}\n"


def _entry(measured: Row | HostOverhead) -> dict[str, Any]:
    """Return the JSON object of a row or of a host overhead, which has the fields of its point."""
    fields = {name: value for name, value in vars(measured).items() if name != "point"}
    return {**fields, **measured.point._asdict()}


def _fields(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the row or the host overhead that an object describes."""
    operation, passes, shape, dtype = (entry.pop(name) for name in Point._fields)
    for name in {"times", "shares", "ratios"} & entry.keys():
        entry[name] = {key: Estimate(*values) for key, values in entry[name].items()}
    if "errors" in entry:
        entry["errors"] = {key: [Deviation(*each) for each in listed] for key, listed in entry["errors"].items()}
    return {**entry, "point": Point(operation, passes, tuple(shape), dtype)}


def _rounded(value: Any) -> Any:
    """Round all numbers to four significant digits, more than any measurement has."""
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
