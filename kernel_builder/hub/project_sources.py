"""The sources of a project, which are published on `main`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from kernel_builder.hub.remote_repository import Content, RemoteFile


def published_files(root: Path) -> dict[str, Content]:
    """Return the files of a project that are published on `main`, by path.

    Hidden files, builds and bytecode are left out, and in a git repository also the files that git ignores.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
        listed = os.fsdecode(done.stdout).split("\0") if done.returncode == 0 else []
    except FileNotFoundError:
        listed = []
    names = [PurePosixPath(name) for name in listed if name] or [
        PurePosixPath(path.relative_to(root).as_posix()) for path in root.rglob("*")
    ]
    return {
        str(name): Content(root / name)
        for name in sorted(names)
        if (root / name).is_file()
        and (root / name).resolve().is_relative_to(root)
        and name.parts[0] != "build"
        and not any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        and name.suffix != ".pyc"
    }


def outdated(there: Mapping[str, RemoteFile], wanted: Mapping[str, Content]) -> Iterator[str]:
    """Return the files on `main` in the project's directories that the project no longer has.

    Files in other directories of `main` do not belong to the project and are kept.
    """
    own = {path.partition("/")[0] for path in wanted if "/" in path}
    return (path for path in there if "/" in path and path.partition("/")[0] in own and path not in wanted)
