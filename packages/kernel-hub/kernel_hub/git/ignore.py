"""Which files a `.gitignore` excludes from an upload, by git's own rules.

Clients rely on the server for the answer, in the response to `preupload`.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pygit2

from kernel_hub.refusals import bad_request

# Git tries each group of stars of a rule at every position of a path, there with each character in brackets: a rule
# with many takes years.
_STARS = re.compile(rb"\*+")
_MAX_STEPS = 1_000_000_000  # an upper bound, which usual rules are far from; at worst 0.5 s of git


def ignored(rules: bytes, paths: Sequence[str]) -> set[str]:
    """Return the paths that a `.gitignore` at the top of a repository excludes.

    Raises:
        Refusal: If the rules may take too long to apply.
    """
    if not rules.strip() or not paths:
        return set()
    depth = max(path.count("/") + 1 for path in paths)
    lengths = Counter(map(len, paths))
    groups = Counter((len(_STARS.findall(rule)), len(rule.partition(b"[")[2]) + 1) for rule in rules.splitlines())
    steps = sum(
        count * number * depth * characters * length**stars
        for length, count in lengths.items()
        for (stars, characters), number in groups.items()
    )
    if steps > _MAX_STEPS:
        raise bad_request(
            "the rules of .gitignore take too long to apply: use fewer stars and shorter brackets in one rule"
        )
    with tempfile.TemporaryDirectory(prefix="kernel-builder-") as folder:
        git = pygit2.init_repository(folder)
        git.config["core.excludesfile"] = os.devnull  # the operator's rules do not apply
        Path(folder, ".git/info/exclude").unlink(missing_ok=True)
        Path(folder, ".gitignore").write_bytes(rules)
        return {path for path in paths if git.path_is_ignored(path)}
