"""Run the attempts of a search: call the agents, judge their kernels, and log the results.

The log decides which steps remain. A try is in it twice: when its agent has ended and the candidate is frozen, and when
it has a verdict. A search that was killed therefore calls no agent again whose candidate it has, and judges nothing
that has a verdict.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from kernel_judge.judge.candidate_files import candidate_digest
from kernel_judge.judge.verdict import RIGHT, WRONG, Notify, Verdict, cause
from kernel_judge.search import workspace as files
from kernel_judge.search.limited_process import Ended, kill_marked, run_limited
from kernel_judge.search.local_judge import Judge, Judged
from kernel_judge.search.mailbox import is_mailbox
from kernel_judge.search.run_log import AGENT_ENDED, REFERENCE_PEER, TRY_ENDED, Event, RunLog
from kernel_judge.search.search_request import PlannedAttempt, SearchRequest, agent_command
from kernel_judge.search.workspace import Workspace

NO_CANDIDATE, NO_VERDICT = "no-candidate", "no-verdict"  # outcomes of a try besides RIGHT and WRONG
_BUSY = 1.5  # load of a core
_UNCERTAIN = 2.0  # the ends of an interval
_OUTPUT_TAIL = 2000  # bytes of an agent's output, for the feedback on a failure


class _Stopped(Exception):
    """The search ends; the try is not in the log and will be made again."""


@dataclass
class Supervisor:
    """Runs attempts in parallel; each judges through `judge`, which lets one candidate at a time onto a device."""

    request: SearchRequest
    task_name: str
    judge: Judge
    log: RunLog
    notify: Notify

    def __post_init__(self) -> None:
        self._commands = {agent: agent_command(agent) for agent in self.request.agents}
        self._stopping = threading.Event()
        self._guard = threading.Lock()
        self._judging: dict[str, threading.Lock] = {}
        self._has_warned = False
        # Of each judged candidate: the verdict, and the attempt and try that it was first given to.
        self._known: dict[str, tuple[Judged, list[int]]] = {}
        for event in self.log.events:
            if event["event"] == TRY_ENDED and event["outcome"] in (RIGHT, WRONG) and not event["judged-as"]:
                self._known[event["candidate"]] = (Judged.from_dict(event["judged"]), [event["attempt"], event["try"]])

    def run(self) -> None:
        """Make every try that the log does not have.

        Raises:
            OSError: If the directory of the search cannot be written.
        """
        kill_marked(str(self.request.run))  # agents and judges of a search that was killed
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        if self.request.ray is None and load > _BUSY * cores:
            self._warn(f"the machine is busy before the search has begun (load {load:.1f}, {cores} cores)")
        pool = ThreadPoolExecutor(self.request.jobs, thread_name_prefix="attempt")
        try:
            running = [pool.submit(self._attempt, attempt) for attempt in self.request.planned()]
            for done in as_completed(running):
                done.result()
        except BaseException:
            self._stopping.set()
            kill_marked(str(self.request.run))
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
        candidate, digest = workspace.frozen_candidate(), ended["candidate"]
        judged: Judged | None = None
        origin: list[int] | None = None
        if candidate and digest:
            judged, origin = self._judged(candidate, digest, [attempt.number, number])
        outcome = _outcome(judged)
        self.log.append(
            TRY_ENDED,
            attempt=attempt.number,
            **{"try": number, "agent": attempt.agent, "context": list(attempt.context), "outcome": outcome},
            candidate=digest,
            **{"agent-seconds": ended["seconds"], "judged-as": origin},
            judged=judged.as_dict() if judged else None,
        )
        summary = _speed(judged.verdict) if judged and judged.verdict and outcome == RIGHT else _reason(judged)
        self.notify(f"attempt {attempt.number}, try {number} ({attempt.agent}): {outcome}{summary}")
        speed = judged.verdict.speed.get(REFERENCE_PEER) if judged and judged.verdict else None
        if speed and speed.high > _UNCERTAIN * speed.low:
            self._warn(f"a speed was measured as {speed.ratio:.2f} ({speed.low:.2f} to {speed.high:.2f})")

    def _warn(self, why: str) -> None:
        """Say once that times are uncertain, before agents have worked for hours."""
        if not self._has_warned:
            self._has_warned = True
            self.notify(
                f"Speeds will be uncertain: {why}. Which kernel is the fastest may be chance. Stop other work, or use "
                "-j 1 if agents and the judge share the CPU."
            )

    def _agent_ended(self, attempt: PlannedAttempt, number: int, workspace: Workspace) -> Event:
        """Call the agent, unless the log says how its call ended."""
        key = {"attempt": attempt.number, "try": number}
        if event := self.log.find(AGENT_ENDED, **key):
            return event
        if not (is_mailbox(attempt.agent) and workspace.is_prepared()):  # who answers may be at work between two starts
            before = Workspace(self.request.run, attempt.number, number - 1).frozen_candidate() if number > 1 else None
            feedback = self._feedback(attempt.number, number - 1)
            prompt = files.prompt_text(self.request, attempt, self.task_name, feedback)
            workspace.prepare(prompt, attempt.context, files.judge_script(self.request), before)
        ended = self._call(attempt.agent, workspace)
        if ended.stopped == "search":
            raise _Stopped
        frozen = workspace.freeze()
        entry = {
            "exit-status": ended.exit_status,
            "stopped": ended.stopped,
            "seconds": round(ended.seconds, 3),
            "candidate": candidate_digest(frozen) if frozen else None,
        }
        self.log.append(AGENT_ENDED, **key, **entry)
        return entry

    def _call(self, agent: str, workspace: Workspace) -> Ended:
        with workspace.log.open("wb") as output:
            return run_limited(
                self._commands[agent],
                workspace.directory,
                os.environ,
                self.request.limits,
                mark=workspace.mark,
                stdin=workspace.directory / files.PROMPT,
                output=output,
                is_stopping=self._stopping.is_set,
            )

    def _judged(self, candidate: Path, digest: str, place: list[int]) -> tuple[Judged, list[int] | None]:
        """Judge a candidate, or take the verdict on an equal one; also return the attempt and try that got it."""
        with self._guard:
            lock = self._judging.setdefault(digest, threading.Lock())
        with lock:
            if digest in self._known:
                return self._known[digest]
            if self._stopping.is_set():
                raise _Stopped
            judged = self.judge.judge(candidate)
            if self._stopping.is_set():  # the judge was killed
                raise _Stopped
            if judged.verdict:
                self._known[digest] = judged, place
        return judged, None

    def _feedback(self, attempt: int, number: int) -> str:
        """Return the report on the last try for the agent's prompt; empty before the first."""
        if number == 0:
            return ""
        key = {"attempt": attempt, "try": number}
        call, result = self.log.find(AGENT_ENDED, **key), self.log.find(TRY_ENDED, **key)
        assert call and result
        lines = ["", "## Your last try", ""]
        if call["stopped"]:
            limit = {"time": "its limit of time", "disk": "its limit of disk"}[call["stopped"]]
            lines.append(f"It was stopped because it met {limit}.")
        elif call["exit-status"]:
            log = Workspace(self.request.run, attempt, number).log
            tail = log.read_bytes()[-_OUTPUT_TAIL:].decode(errors="replace")
            lines.append(f"It ended with exit status {call['exit-status']} and this output:\n\n```\n{tail}\n```\n")
        if result["outcome"] == NO_CANDIDATE:
            lines.append("It wrote no candidate.")
        else:
            judged = Judged.from_dict(result["judged"])
            lines.append(files.verdict_text(judged.verdict) if judged.verdict else str(judged.error))
        return "\n".join(lines) + "\n"


def _outcome(judged: Judged | None) -> str:
    if judged is None:
        return NO_CANDIDATE
    if judged.verdict is None:
        return NO_VERDICT
    return RIGHT if judged.verdict.is_right else WRONG


def _speed(verdict: Verdict) -> str:
    return "".join(f", {speed.ratio:.2f} times the speed of {peer}" for peer, speed in verdict.speed.items())


def _reason(judged: Judged | None) -> str:
    if judged is None:
        return ""
    reason = judged.verdict.reason if judged.verdict else judged.error
    return f": {cause(reason or '')}"
