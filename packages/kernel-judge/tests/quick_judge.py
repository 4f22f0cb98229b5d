"""A judge for tests of the steps after a judge: it believes the candidate.

    python quick_judge.py [--both-nodes] CANDIDATE --task TASK --json

A candidate's line `# right 1.5` or `# wrong` is its verdict. Each call adds a line to $QUICK_JUDGE_CALLS.
`--both-nodes`: it answers once both nodes have begun to judge, and its device is the cache of its node.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from pathlib import Path

from kernel_judge.judge.verdict import Speedup, Verdict


def main(candidate: Path, task: Path, device: str) -> int:
    text = candidate.read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    with Path(os.environ["QUICK_JUDGE_CALLS"]).open("a") as calls:
        calls.write(f"{digest} {time.monotonic():.4f} ")
        calls.flush()
        stated = re.search(r"# (right|wrong|broken|stuck) ?([\d.]*)", text)
        assert stated
        time.sleep(60 if stated[1] == "stuck" else float(os.environ.get("QUICK_JUDGE_SECONDS", "0")))
        calls.write(f"{time.monotonic():.4f}\n")
    if stated[1] == "broken":
        sys.exit("no such device")
    right = stated[1] == "right"
    ratio = float(stated[2] or 1)
    if "lucky" in text and Path(os.environ["QUICK_JUDGE_CALLS"]).read_text().count(digest) > 1:
        ratio = 0.9  # the first time was a mistake
    print(
        Verdict(
            verdict=stated[1],
            reason="" if right else "it is wrong on purpose",
            rejected_as=None if right else "wrong-result",
            failing_case=None,
            task=task.stem,
            task_digest="0" * 64,
            candidate_digest=digest,
            sandbox="process",
            device=device,
            seconds=0.0,
            speed={"eager": Speedup(ratio, ratio * 0.98, ratio * 1.02)} if right else {},
        ).to_json()
    )
    return 0 if right else 1


def name_of_node() -> str:
    """Wait for both nodes, even if one takes long to start its first worker, and return the name of this one."""
    cache, deadline = Path(os.environ["KERNEL_BUILDER_CACHE"]), time.monotonic() + 60
    (cache / "judging").touch()
    while len(list(cache.parent.glob("*/judging"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    return cache.name


if __name__ == "__main__":
    *option, given, _, chosen, _ = sys.argv[1:]
    sys.exit(main(Path(given), Path(chosen), name_of_node() if option else "none"))
