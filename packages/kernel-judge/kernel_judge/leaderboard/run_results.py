"""The tries of searches as results of a page."""

from __future__ import annotations

import json

from kernel_judge.leaderboard.result import UNSIGNED, Result, read_file, texts_of
from kernel_judge.search.run_report import RunReport

_LOG_BYTES = 20_000  # of the end of an agent's output


def run_results(report: RunReport) -> list[Result]:
    """Return the judged tries with their code and the ends of their logs."""
    results = []
    for attempt in report.attempts:
        for each in attempt.tries:
            if each.verdict:
                name = f"attempt {attempt.number}, try {each.number}, {attempt.agent}"
                candidate, path = each.workspace.frozen_candidate(), each.workspace.log
                code = texts_of(candidate, errors="replace") if candidate else {}
                log = read_file(path, tail=_LOG_BYTES).decode(errors="replace") if path.exists() else ""
                content = json.dumps({"verdict": each.verdict.as_dict(), "candidate": code}, sort_keys=True).encode()
                results.append(Result(each.verdict, name, {"candidate": code}, log, UNSIGNED, content))
    return results
