"""Which files a `.gitignore` excludes from an upload, by git's own rules.

The API's `preupload` promises the answer, whatever proxy is in front.

A rule of thirty letters can take git years: its stars are tried at every place. So a process of its own applies such
rules, with a limit of its CPU time, and the server's other threads go on meanwhile. It takes 0.2 s to start, so usual
rules are applied here.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CPU_SECONDS = 1
# A rule with one star, or one `**`, is compared at each place of a path, and at each level of its directories. The most
# levels of all paths, and the most bytes of rules times those of paths at each level: 0.1 s in all.
_LINEAR = re.compile(rb"[^*]*\**[^*]*")
_MOST_LEVELS, _MOST_COMPARED = 1000, 10_000_000
_SECONDS = 20.0  # on a machine with other work


def ignored(rules: bytes, paths: Sequence[str]) -> set[str]:
    """Return the paths that a `.gitignore` at the top of a repository excludes.

    Raises:
        Refusal: If it takes too long to tell.
    """
    from kernel_hub.refusals import bad_request

    if not rules.strip() or not paths:
        return set()
    if _is_quick(rules, paths):
        return set(_excluded(rules, paths))
    asked = json.dumps({"rules": rules.decode("latin-1"), "paths": list(paths)}).encode()
    with tempfile.TemporaryDirectory(prefix="kernel-builder-") as folder:
        # The directory is removed here, where the process is killed.
        environment = {**os.environ, "TMPDIR": folder}
        command = [sys.executable, "-I", __file__]
        try:
            done = subprocess.run(
                command, input=asked, capture_output=True, check=False, timeout=_SECONDS, env=environment
            )
        except subprocess.TimeoutExpired:
            done = None
    if done is None or done.returncode < 0:
        raise bad_request("the rules of .gitignore take too long to apply: use fewer stars in one rule")
    done.check_returncode()
    return set(json.loads(done.stdout))


def _is_quick(rules: bytes, paths: Sequence[str]) -> bool:
    levels = [path.count("/") + 1 for path in paths]
    compared = len(rules) * sum(len(path) * level for path, level in zip(paths, levels, strict=True))
    few = sum(levels) <= _MOST_LEVELS and compared <= _MOST_COMPARED
    return few and all(map(_LINEAR.fullmatch, rules.splitlines()))


def _excluded(rules: bytes, paths: Sequence[str]) -> list[str]:
    import pygit2

    with tempfile.TemporaryDirectory(prefix="kernel-builder-") as folder:
        git = pygit2.init_repository(folder)
        git.config["core.excludesfile"] = os.devnull  # not the rules of the operator
        Path(folder, ".git/info/exclude").unlink(missing_ok=True)
        Path(folder, ".gitignore").write_bytes(rules)
        return [path for path in paths if git.path_is_ignored(path)]


def _main() -> None:
    import pygit2  # noqa: F401  # its import is no part of the limit

    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.load(sys.stdin)
    json.dump(_excluded(asked["rules"].encode("latin-1"), asked["paths"]), sys.stdout)


if __name__ == "__main__":
    _main()
