"""The judge of a search: that of this machine, or of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernel_judge.search.limited_process import MARK
from kernel_judge.search.local_judge import Judge, LocalJudge
from kernel_judge.search.ray_judge import ray_judge


@contextmanager
def open_judge(settings: Mapping[str, Any], task: Path, mark: str | None = None) -> Iterator[Judge]:
    """Yield the judge of a search.

    Args:
        settings: Of `SearchRequest.judge_settings`: "command", "seconds" and "ray".
        mark: Of the judge's processes on this machine; None for that of this process.

    Raises:
        ToolchainError: If the judge is a Ray cluster that cannot be reached.
    """
    command, seconds = tuple(settings["command"]), settings["seconds"]
    if settings["ray"] is None:
        yield LocalJudge(task, seconds=seconds, command=command, environment={MARK: mark} if mark else {})
        return
    with ray_judge(settings["ray"], task, seconds=seconds, command=command) as judge:
        yield judge
