"""Prepare a search and run its attempts: call the agents, judge their kernels, and log the results.

The log decides which steps remain. A try is in it twice: when its agent has ended and the candidate is frozen, and when
it has a verdict. A search that was killed therefore calls no agent again whose candidate it has, and judges nothing
that has a verdict.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from kernel_builder.api import create_project
from kernel_format.errors import ConfigError
from kernel_format.files import replaced_directory
from kernel_judge.judge.candidate_files import candidate_digest, copy_candidate
from kernel_judge.judge.verdict import Notify, cause
from kernel_judge.search import workspace as files
from kernel_judge.search.limited_process import run_limited
from kernel_judge.search.local_judge import Judge
from kernel_judge.search.run_log import AGENT_ENDED, TRY_ENDED, Event, RunLog
from kernel_judge.search.search_request import REFERENCE, SKILL, PlannedAttempt, SearchRequest, agent_command
from kernel_judge.search.tries import Try
from kernel_judge.search.workspace import PROJECT, Workspace
from kernel_tasks import Task

_OUTPUT_TAIL = 2000  # bytes of an agent's output, for the feedback on a failure


class _Stopped(Exception):
    """The search ends; the try is not in the log and will be made again."""


@dataclass
class Supervisor:
    """Runs attempts in parallel; each judges through `judge`, which lets one candidate at a time onto a device."""

    request: SearchRequest
    task: Task
    judge: Judge
    log: RunLog
    notify: Notify
    stopping: threading.Event

    def run(self) -> None:
        """Make every try that the log does not have."""
        pool = ThreadPoolExecutor(self.request.jobs, thread_name_prefix="attempt")
        try:
            running = {pool.submit(self._attempt, attempt): attempt.number for attempt in self.request.planned()}
            errors = []
            for done in as_completed(running):
                if error := done.exception():  # the other attempts go on; the same search makes this one again
                    self.notify(f"attempt {running[done]} has failed: {type(error).__name__}: {error}")
                    errors.append(error)
            if len(errors) == len(running):
                raise errors[0]
        except BaseException:
            self.stopping.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _attempt(self, attempt: PlannedAttempt) -> None:
        for number in range(1, self.request.tries + 1):
            if not self.log.find(TRY_ENDED, attempt=attempt.number, **{"try": number}):
                try:
                    self._try(attempt, number)
                except _Stopped:
                    return

    def _try(self, attempt: PlannedAttempt, number: int) -> None:
        workspace = Workspace(self.request.run, attempt.number, number)
        ended = self._agent_ended(attempt, number, workspace)
        candidate = workspace.frozen_candidate()
        judged = self.judge(candidate) if candidate else None
        if self.stopping.is_set():  # the judge may have been stopped
            raise _Stopped
        call = ended["candidate"], ended["seconds"], ended["stopped"]
        made = Try(self.request.run, attempt.number, number, attempt.agent, attempt.context, *call, judged)
        self.log.append(TRY_ENDED, **made.as_event())
        speeds = made.verdict.speed if made.verdict else {}
        listed = ", ".join(f"{speed.ratio:.2f} times the speed of {peer}" for peer, speed in speeds.items())
        detail = cause(made.reason) or listed or "not timed"
        self.notify(f"attempt {attempt.number}, try {number}: {made.outcome}, {detail}")

    def _agent_ended(self, attempt: PlannedAttempt, number: int, workspace: Workspace) -> Event:
        """Call the agent, unless the log says how its call ended."""
        key = {"attempt": attempt.number, "try": number}
        if event := self.log.find(AGENT_ENDED, **key):
            return event
        before = Workspace(self.request.run, attempt.number, number - 1).frozen_candidate() if number > 1 else None
        feedback = self._feedback(attempt.number, number - 1)
        prompt = files.prompt_text(self.request, attempt, self.task, feedback)
        workspace.prepare(prompt, attempt.context, files.judge_script(self.request), before)
        with workspace.log.open("wb") as output:
            ended = run_limited(
                agent_command(attempt.agent),
                workspace.directory,
                self.request.limits,
                stdin=workspace.directory / files.PROMPT,
                output=output,
                is_stopping=self.stopping.is_set,
            )
        if ended.stopped == "search":
            raise _Stopped
        frozen = workspace.freeze()
        entry = {"exit-status": ended.exit_status, "stopped": ended.stopped, "seconds": round(ended.seconds, 3)}
        entry["candidate"] = candidate_digest(frozen) if frozen else None
        self.log.append(AGENT_ENDED, **key, **entry)
        return entry

    def _feedback(self, attempt: int, number: int) -> str:
        """Return the report on the last try for the agent's prompt; empty before the first."""
        if number == 0:
            return ""
        key = {"attempt": attempt, "try": number}
        call, result = self.log.find(AGENT_ENDED, **key), self.log.find(TRY_ENDED, **key)
        assert call and result
        made = Try.from_event(result, self.request.run)
        lines = ["", "## Your last try", ""]
        if call["stopped"] and made.judged:  # the reason of a try without a candidate states it
            lines.append(f"It was stopped because it met its limit of {call['stopped']}.")
        elif call["exit-status"]:
            tail = made.workspace.log.read_bytes()[-_OUTPUT_TAIL:].decode(errors="replace")
            lines.append(f"It ended with exit status {call['exit-status']} and this output:\n\n```\n{tail}\n```\n")
        lines.append(files.verdict_text(made.verdict) if made.verdict else made.reason)
        return "\n".join(lines) + "\n"


def repo_id(task: Task) -> str:
    """Return a repository for the kernel of a task, whose name has small letters, digits and dashes, a letter first."""
    words = re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-")
    name = words if re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", words) else f"kernel-{words}".rstrip("-")
    return f"local/{name}"


def prepare(request: SearchRequest, task: Task, backends: Sequence[str]) -> None:
    """Create `given/` in the directory of a search."""
    wanted = {name for context in request.contexts for name in context}
    if REFERENCE in wanted and not request.references:
        raise ConfigError("no file is named", where="--context reference", hint="add --reference FILE")
    with replaced_directory(request.run / "given") as staged:
        task.save(staged / "task")
        create_project(staged / PROJECT, repo_id(task), backends, license_name="apache-2.0")
        if SKILL in wanted:
            (staged / "context").mkdir()
            copy_candidate(request.skill, staged / "context" / SKILL)  # an agent may have written it
        if REFERENCE in wanted:
            (staged / "context" / REFERENCE).mkdir(parents=True)
        for source in request.references if REFERENCE in wanted else ():
            for path in (source, *source.rglob("*")):
                if path.is_symlink():
                    raise ConfigError("is a symbolic link", where=str(path), hint="name the file itself")
            copy_candidate(source.resolve(), staged / "context" / REFERENCE / source.resolve().name)
