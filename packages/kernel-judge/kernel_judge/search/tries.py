"""The tries of a search: the calls of its agents with the verdicts on their kernels, as the log has them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernel_judge.judge.candidate_files import LIMITS
from kernel_judge.judge.verdict import Speedup, Verdict
from kernel_judge.search.local_judge import Judged
from kernel_judge.search.run_log import TRY_ENDED, Event
from kernel_judge.search.workspace import Workspace

_KEYS = ("attempt", "try", "agent", "context", "candidate", "agent-seconds", "stopped")


class Try(NamedTuple):
    """One call of an agent. `candidate` is the digest of its kernel; without a kernel it is None, as `judged` is."""

    run: Path
    attempt: int
    number: int
    agent: str
    context: Sequence[str]
    candidate: str | None
    agent_seconds: float
    stopped: str | None  # the limit that the call met
    judged: Judged | None

    @property
    def workspace(self) -> Workspace:
        """The directories of the call."""
        return Workspace(self.run, self.attempt, self.number)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict; None without a kernel, and if the judge had failed."""
        return self.judged.verdict if self.judged else None

    @property
    def outcome(self) -> str:
        """Return "right", "wrong", "no-candidate" or "no-verdict"."""
        if not self.judged:
            return "no-candidate"
        return self.verdict.verdict if self.verdict else "no-verdict"

    @property
    def reason(self) -> str:
        """Why it is not right; empty if it is."""
        if not self.judged:
            stopped = f"It was stopped because it met its limit of {self.stopped}. " if self.stopped else ""
            return f"{stopped}It wrote no candidate that can be copied: regular files, at most {LIMITS}."
        return self.verdict.reason if self.verdict else self.judged.error or ""

    @property
    def ratio(self) -> float:
        """The speed of a right kernel relative to eager; 0 for any other."""
        return self.verdict.ratio if self.verdict and self.verdict.is_right else 0.0

    def speed(self, peer: str) -> Speedup | None:
        """Return the speed relative to a peer, or None if it was not measured."""
        return self.verdict.speed.get(peer) if self.verdict else None

    def as_event(self) -> dict[str, Any]:
        """Return the try as the log has it."""
        values = dict(zip(_KEYS, self[1:-1], strict=True))
        return {**values, "outcome": self.outcome, "judged": self.judged.as_dict() if self.judged else None}

    @staticmethod
    def from_event(event: Event, run: Path) -> Try:
        """Read the result of `as_event`."""
        judged = Judged.from_dict(event["judged"]) if event["judged"] else None
        return Try._make([run, *(event.get(key) for key in _KEYS), judged])


def tries_of(events: Iterable[Event], run: Path) -> list[Try]:
    """Return the tries that have ended, by attempt and number."""
    tries = [Try.from_event(event, run) for event in events if event["event"] == TRY_ENDED]
    return sorted(tries, key=lambda each: (each.attempt, each.number))


def agent_names(agents: Iterable[str]) -> dict[str, str]:
    """Return command -> its program's name, as its arguments may contain a key; with a number if several have one."""
    commands = list(dict.fromkeys(agents))
    names = [Path(shlex.split(command)[0]).name for command in commands]
    numbered = [f"{name} {names[:index].count(name)}" for index, name in enumerate(names, 1)]
    unique = [name if names.count(name) == 1 else number for name, number in zip(names, numbered, strict=True)]
    return dict(zip(commands, unique, strict=True))
