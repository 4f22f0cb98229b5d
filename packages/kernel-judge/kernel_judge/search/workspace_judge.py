"""`./judge` of a workspace: prints the verdict on the current files.

It waits for a free device, as the search does. The search does not read the result: it judges again when the agent has
ended.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from kernel_format.errors import KernelBuilderError
from kernel_judge.search.local_judge import open_judge
from kernel_judge.search.run_log import LOG, STARTED, read_events
from kernel_judge.search.workspace import PROJECT, take_candidate, task_path, verdict_text


def main(run: Path, workspace: Path) -> int:
    """Print the verdict; return 0 if the candidate is right, 1 if not, and 2 if there is no verdict."""
    settings = [event for event in read_events(run / LOG) if event["event"] == STARTED][-1]["judge"]
    with tempfile.TemporaryDirectory() as scratch, open_judge(settings, task_path(run), lambda: False) as judge:
        candidate = take_candidate(workspace, run / "given" / PROJECT, Path(scratch) / "candidate")
        judged = judge(candidate) if candidate else None
    if judged is None or judged.verdict is None:
        absent = "There is no candidate: write candidate.py, or change the project in kernel/."
        print(judged.error if judged else absent)
        return 2
    print(verdict_text(judged.verdict))
    return 0 if judged.verdict.is_right else 1


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
    except KernelBuilderError as error:
        print(f"{error}\n{error.hint or ''}")
        sys.exit(2)
    except OSError as error:  # a sandbox of the agent's own
        print(f"The judge cannot work here: {error}. Go on without it: the search judges when you end.")
        sys.exit(2)
