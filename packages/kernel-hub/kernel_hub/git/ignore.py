"""Which files a `.gitignore` excludes from an upload, by git's own rules.

Clients rely on the server for the answer, in the response to `preupload`.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pygit2

from kernel_hub.git.command import git_command, git_environment
from kernel_hub.refusals import bad_request

_CPU_SECONDS = 1  # git tries each star of a rule at every position of a path: a rule with many takes years


def ignored(rules: bytes, paths: Sequence[str]) -> set[str]:
    """Return the paths that a `.gitignore` at the top of a repository excludes.

    Raises:
        Refusal: If the rules take too long to apply.
    """
    if not rules.strip() or not paths:
        return set()
    with tempfile.TemporaryDirectory(prefix="kernel-builder-") as folder:
        Path(folder, ".gitignore").write_bytes(rules)
        pygit2.init_repository(folder)
        with subprocess.Popen(
            git_command("-C", folder, "check-ignore", "--no-index", "-z", "--stdin"),
            env=git_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as git:
            with suppress(ProcessLookupError):
                resource.prlimit(git.pid, resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
                os.setpriority(os.PRIO_PROCESS, git.pid, 19)
            # A path that starts with a colon would be a pattern.
            excluded, _ = git.communicate("".join(f"./{path}\0" for path in paths).encode())
    if git.returncode < 0:
        raise bad_request("the rules of .gitignore take too long to apply: use fewer stars in one rule")
    if git.returncode > 1:
        raise OSError(f"git check-ignore failed with exit status {git.returncode}")
    return {path.removeprefix("./") for path in excluded.decode().split("\0")} - {""}
