"""The public Python API of searches: run one, read its tries, run an agent under limits.

Programs that search, such as torch-kernel-skills, import this module and no other of the judge. It imports Torch when a
search is run.
"""

from __future__ import annotations

from pathlib import Path

from kernel_judge.judge.verdict import RIGHT, WRONG, Notify
from kernel_judge.search.limited_process import Limits, run_limited
from kernel_judge.search.run_log import LOG, read_events
from kernel_judge.search.search_request import CUDA_KERNELS, SKILL, SearchRequest
from kernel_judge.search.tries import Try, tries_of
from kernel_judge.search.workspace import task_path

__all__ = [
    "CUDA_KERNELS", "RIGHT", "SKILL", "WRONG", "Limits", "Notify", "SearchRequest", "Try", "read_tries", "run_limited",
    "run_search", "task_path",
]  # fmt: skip


def run_search(request: SearchRequest, notify: Notify) -> None:
    """Make the attempts of a search that its log does not have, and write the best kernel to `best/`."""
    from kernel_judge.search import search_run

    search_run.run_search(request, notify)


def read_tries(run: Path) -> list[Try]:
    """Return the tries of the search in a directory, by attempt and number.

    Raises:
        ConfigError: If there is no search.
    """
    return tries_of(read_events(run / LOG), run.absolute())
