"""The request of a search, and its attempts."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kernel_format.errors import ConfigError
from kernel_judge.search.limited_process import Limits
from kernel_judge.search.local_judge import JUDGE_COMMAND

SKILL, REFERENCE = CONTEXTS = ("skill", "reference")
GIGABYTE = 10**9


class PlannedAttempt(NamedTuple):
    """One attempt: a number from 1, the agent's command, and its contexts."""

    number: int
    agent: str
    context: tuple[str, ...]


@dataclass(frozen=True)
class SearchRequest:
    """One search for a kernel that does a task.

    Attributes:
        task: The task's file or directory.
        run: The directory of the search. One that exists is continued.
        agents: Commands, each as one string that is split as a shell does; attempts take them in turn.
        attempts: How many attempts there are in all.
        tries: How often an attempt's agent is called; each call knows the verdict on the one before.
        contexts: The contexts of the agents; attempts use these in turn, after each round of agents.
        jobs: The most attempts at a time.
        limits: The limits of one call of an agent.
        repo_id: The Hub repository of the kernel; None for `local/` and the name of the task.
        skill: The directory of the skill that the context "skill" gives.
        references: The files that the context "reference" gives.
        ray: The address of a Ray cluster whose machines judge; None for this machine.
        judge_seconds: The judge is stopped after this time.
        judge: The judge's command.
    """

    task: Path
    run: Path
    agents: tuple[str, ...]
    attempts: int = 1
    tries: int = 1
    contexts: tuple[tuple[str, ...], ...] = ((),)
    jobs: int = 1
    limits: Limits = field(default=Limits(1800, 16 * GIGABYTE, 2 * GIGABYTE))
    repo_id: str | None = None
    skill: Path | None = None
    references: tuple[Path, ...] = ()
    ray: str | None = None
    judge_seconds: float = 1800
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
        return {
            "agents": list(self.agents),
            "tries": self.tries,
            "contexts": [list(context) for context in self.contexts],
            "repo-id": self.repo_id,
        }


def agent_command(agent: str) -> list[str]:
    """Split an agent's command; a program with a slash in its name is relative to the current directory.

    Raises:
        ConfigError: If there is no such program.
    """
    try:
        program, *arguments = shlex.split(agent)
    except ValueError as error:
        raise ConfigError(f"{agent!r} is not a command: {error}", where="--agent") from error
    path = shutil.which(program)
    if path is None:
        raise ConfigError(
            f"there is no program {program!r}",
            where="--agent",
            hint="name an executable file, or a command that the shell finds",
        )
    return [str(Path(path).absolute()), *arguments]


def parse_context(text: str) -> tuple[str, ...]:
    """Read `skill,reference` or `none`.

    Raises:
        ConfigError: If a name is not a context.
    """
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    if chosen == ["none"]:
        return ()
    for name in chosen:
        if name not in CONTEXTS:
            raise ConfigError(
                f"{name!r} is not a context",
                where="--context",
                hint=f"expected none, or names from {', '.join(CONTEXTS)} with commas between",
            )
    return tuple(name for name in CONTEXTS if name in chosen)
