"""Which projects of a git repository a change touches."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from kernel_builder.checkouts import git_output
from kernel_builder.config.project_files import in_work_tree, work_tree
from kernel_format.errors import ConfigError
from kernel_sandbox.programs import find_program


def touched(directories: Sequence[Path], since: str, shared: Sequence[Path] = ()) -> list[Path]:
    """Return the project directories that differ between HEAD and the commit where its history left that of `since`.

    A project is touched if a file in its directory has changed, or a file that a symbolic link of the project leads to.
    Changes that are not committed do not count.

    Args:
        since: Any name of a commit, such as `main` or `HEAD^1`.
        shared: Files and directories whose change touches every project.
    """
    projects: dict[Path, list[Path]] = defaultdict(list)
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError("does not exist", where=str(directory), hint="name directories of kernel projects")
        projects[work_tree(Path(os.path.realpath(directory)))].append(directory)
    affected: set[Path] = set()
    for top, inside in projects.items():
        changed = _changed_files(top, since)
        if _contain(_shared_places(shared), changed):
            affected.update(inside)
        affected.update(directory for directory in inside if _contain(places(directory), changed))
    return [directory for directory in directories if directory in affected]


def places(directory: Path) -> set[Path]:
    """Return the directory of a project, and the files and directories that its symbolic links lead to.

    Links out of the git repository are left out: `read_project` refuses those that a build uses.
    """
    root = Path(os.path.realpath(directory))
    reached, queue = {root}, [root]
    while queue:
        for folder, folders, files in os.walk(queue.pop()):
            for path in (Path(folder, name) for name in (*folders, *files)):
                target = Path(os.path.realpath(path))
                if path.is_symlink() and in_work_tree(root, target) and not _contain(reached, [target]):
                    reached.add(target)
                    queue.append(target)
    return reached


def _contain(above: Iterable[Path], paths: Iterable[Path]) -> bool:
    parents = set(above)
    return any(not parents.isdisjoint((path, *path.parents)) for path in paths)


def _shared_places(shared: Sequence[Path]) -> list[Path]:
    for path in shared:
        if not path.exists():
            hint = "correct the path; it is relative to the current directory"
            raise ConfigError("does not exist", where=f"--shared {path}", hint=hint)
    return [Path(os.path.realpath(path)) for path in shared]


def _changed_files(top: Path, since: str) -> list[Path]:
    # The name before a rename matters as much as the name after it.
    changes = ("diff-tree", "-r", "--name-only", "--no-renames", "--ignore-submodules=none", "-z", "--merge-base")
    listed = git_output(top, *changes, "--end-of-options", since, "HEAD")
    if listed is None:
        if find_program("git") is None:
            raise ConfigError("git is not installed, so changes cannot be listed", where=str(top), hint="install git")
        known = git_output(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{since}^{{commit}}")
        raise ConfigError(
            f"git knows no {f'common ancestor of {since} and HEAD' if known else f'commit {since!r}'} here",
            where=str(top),
            hint="name a commit of this repository, and fetch its history: a shallow clone lacks it "
            "(git fetch --unshallow; `fetch-depth: 0` for actions/checkout)",
        )
    return [top / name for name in os.fsdecode(listed).split("\0") if name]
