"""The verdict on one candidate, and its JSON form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

Notify = Callable[[str], None]
"""Receives messages about the course of long work."""

_ERROR = re.compile(r"\berror\b|Error\b", re.IGNORECASE)
RIGHT, WRONG, NOT_JUDGED = "right", "wrong", "not judged"
EXIT_STATUS = {RIGHT: 0, WRONG: 1, NOT_JUDGED: 11}  # of `judge`; errors of the builder have those between


def cause(reason: str) -> str:
    """Return a reason in one line: its first one, and the last that names an error, such as a compiler's."""
    first, *others = [line.strip() for line in reason.splitlines() if line.strip()] or [""]
    if not others:
        return first
    last = next((line for line in reversed(others) if _ERROR.search(line)), others[-1])
    return f"{first} ... {last}"


class Speedup(NamedTuple):
    """A peer's time divided by the candidate's: the geometric mean over the timed shapes, and its 95 % interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Verdict:
    """Whether a candidate computes its task, and its speed: the keys of docs/judge.md, with underscores for dashes."""

    verdict: str  # "right", "wrong", or "not judged" if this machine cannot build or run the candidate
    reason: str
    rejected_as: str | None
    failing_case: Mapping[str, Any] | None
    task: str
    task_digest: str  # SHA-256 in hexadecimal
    candidate_digest: str
    sandbox: str
    device: str
    seconds: float  # of the whole verdict, with the build
    speed: Mapping[str, Speedup] = field(default_factory=dict)
    missing_peers: Mapping[str, str] = field(default_factory=dict)
    share_of_limit: float | None = None
    sol_score: float | None = None
    suspicious: Sequence[str] = ()
    cases: Sequence[Mapping[str, Any]] = ()

    @property
    def is_right(self) -> bool:
        """Whether the candidate may be used in place of the reference."""
        return self.verdict == RIGHT

    @property
    def ratio(self) -> float:
        """The speed relative to eager PyTorch; 0 if it was not measured."""
        return self.speed["eager"].ratio if "eager" in self.speed else 0.0

    def lines(self) -> list[str]:
        """Return the verdict without its first word and its times, for a person or an agent."""
        lines = []
        if not self.is_right:
            lines.append(f"{self.rejected_as}: {self.reason}" if self.rejected_as else self.reason)
        if self.failing_case:
            lines.append(f"case: {json.dumps(self.failing_case)}")
        lines += [f"{speed} times the speed of {peer}" for peer, speed in self.speed.items()]
        lines += [f"not compared with {peer}: {reason}" for peer, reason in self.missing_peers.items()]
        if self.share_of_limit is not None:
            lines.append(f"{self.share_of_limit:.0%} of the device's limit (SOL score {self.sol_score:.2f})")
        return lines + [f"suspicious: {fact}" for fact in self.suspicious]

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as `judge --json` prints it."""
        values = {field.name.replace("_", "-"): getattr(self, field.name) for field in fields(self)}
        values["speed"] = {name: speedup._asdict() for name, speedup in self.speed.items()}
        return values | {"suspicious": list(self.suspicious), "cases": list(self.cases)}

    def to_json(self) -> str:
        """Return one JSON object on one line."""
        return json.dumps(self.as_dict())

    @staticmethod
    def from_dict(values: Any) -> Verdict:
        """Read the result of `as_dict`.

        Raises:
            ValueError: If it is anything else.
        """
        try:
            values = {name.replace("-", "_"): value for name, value in values.items()}
            values["speed"] = {name: Speedup(**speedup) for name, speedup in values["speed"].items()}
            verdict = Verdict(**values)
            if verdict.verdict not in EXIT_STATUS:
                raise ValueError(f"{verdict.verdict!r} is not one of {', '.join(EXIT_STATUS)}")
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(str(error)) from error
        return verdict
