"""Which files a `.gitignore` excludes from an upload, by git's own rules.

A rule of thirty letters can take git years: its stars are tried at every place. So a process of its own applies the
rules, with a limit of its CPU time, and the server's other threads go on meanwhile.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CPU_SECONDS = 1
_SECONDS = 20.0  # on a machine with other work


def ignored(rules: bytes, paths: Sequence[str]) -> set[str]:
    """Return the paths that a `.gitignore` at the top of a repository excludes.

    Raises:
        Refusal: If it takes too long to tell.
    """
    from kernel_builder.server.refusals import bad_request

    if not rules.strip() or not paths:
        return set()
    asked = json.dumps({"rules": rules.decode("latin-1"), "paths": list(paths)}).encode()
    with tempfile.TemporaryDirectory(prefix="kernel-builder-") as folder:
        command = [sys.executable, "-I", __file__, folder]
        try:
            done = subprocess.run(command, input=asked, capture_output=True, check=False, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            done = None
    if done is None or done.returncode < 0:
        raise bad_request("the rules of .gitignore take too long to apply: use fewer stars in one rule")
    done.check_returncode()
    return set(json.loads(done.stdout))


def _main() -> None:
    import pygit2

    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked, folder = json.load(sys.stdin), sys.argv[1]
    git = pygit2.init_repository(folder)
    git.config["core.excludesfile"] = os.devnull  # not the rules of the operator
    Path(folder, ".git/info/exclude").unlink(missing_ok=True)
    Path(folder, ".gitignore").write_bytes(asked["rules"].encode("latin-1"))
    json.dump([path for path in asked["paths"] if git.path_is_ignored(path)], sys.stdout)


if __name__ == "__main__":
    _main()
