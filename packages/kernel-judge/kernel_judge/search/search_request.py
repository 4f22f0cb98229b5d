"""The request of a search, and its attempts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kernel_format.errors import ConfigError
from kernel_judge.search.limited_process import Limits
from kernel_judge.search.local_judge import JUDGE_COMMAND
from kernel_sandbox.programs import find_program

SKILL, REFERENCE = CONTEXTS = ("skill", "reference")
CUDA_KERNELS = Path(__file__).parent / "cuda-kernels"  # the context "skill" of a search: how to write kernels
GIGABYTE = 10**9


class PlannedAttempt(NamedTuple):
    """One attempt: a number from 1, the agent's command, and its contexts."""

    number: int
    agent: str
    context: tuple[str, ...]


@dataclass(frozen=True)
class SearchRequest:
    """One search for a kernel that does a task."""

    task: Path
    run: Path  # the directory of the search; one that exists is continued
    agents: tuple[str, ...]  # commands, which are split as a shell does; attempts take them in turn
    attempts: int = 1
    tries: int = 1  # calls of the agent in each attempt
    contexts: tuple[tuple[str, ...], ...] = ((),)  # attempts use these in turn, after each round of agents
    jobs: int = 1  # attempts at a time
    limits: Limits = field(default=Limits(1800, 16 * GIGABYTE, 2 * GIGABYTE))  # of one call of an agent
    skill: Path = CUDA_KERNELS  # the directory of the context "skill"
    references: tuple[Path, ...] = ()  # the files of the context "reference"
    ray: str | None = None  # the address of a Ray cluster whose machines judge
    judge_seconds: float = 1800  # the longest verdict
    judge: Sequence[str] = JUDGE_COMMAND

    def planned(self) -> list[PlannedAttempt]:
        """Return all attempts of the search in their order; more attempts do not change the first ones."""
        rounds = ((number, *divmod(number - 1, len(self.agents))) for number in range(1, self.attempts + 1))
        return [
            PlannedAttempt(number, self.agents[agent], self.contexts[turn % len(self.contexts)])
            for number, turn, agent in rounds
        ]

    def judge_settings(self) -> dict[str, Any]:
        """Return how candidates are judged, as the log has it for `./judge`."""
        return {"command": list(self.judge), "seconds": self.judge_seconds, "ray": self.ray}

    def fixed(self) -> dict[str, Any]:
        """Return the settings that must not change when a search is continued, as in the log."""
        return {"agents": list(self.agents), "tries": self.tries, "contexts": list(map(list, self.contexts))}


def agent_command(agent: str) -> list[str]:
    """Split an agent's command; a program with a slash in its name is relative to the current directory."""
    try:
        program, *arguments = shlex.split(agent)
    except ValueError as error:
        raise ConfigError(f"{agent!r} is not a command: {error}", where="--agent") from error
    path = find_program(program)
    if path is None:
        raise ConfigError(f"there is no program {program!r}", where="--agent", hint="name an executable file")
    return [path, *arguments]


def parse_context(text: str) -> tuple[str, ...]:
    """Read `skill,reference` or `none`."""
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    if chosen == ["none"]:
        return ()
    for name in chosen:
        if name not in CONTEXTS:
            hint = f"expected none, or names from {', '.join(CONTEXTS)} with commas between"
            raise ConfigError(f"{name!r} is not a context", where="--context", hint=hint)
    return tuple(name for name in CONTEXTS if name in chosen)
