"""Git objects of a change in progress. They enter the repository when all checks have passed, so none are left over."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pygit2

from kernel_hub.git.objects import retry_reading
from kernel_hub.storage.disk import occupied


class NewObjects:
    """The objects that are written to the repository at `path`, which is opened as `git`.

    Args:
        git: The repository.
        path: Its directory.
        staging: The directory of changes in progress, on the same disk.
    """

    def __init__(self, git: pygit2.Repository, path: Path, staging: Path) -> None:
        self._git = git
        self._objects = path / "objects"
        self._staging = staging
        self._directory: Path | None = None

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """Write objects to a new directory, which is deleted at the end of the context, or to that of `use`."""
        if self._directory is not None:
            yield self._directory
            return
        with tempfile.TemporaryDirectory(dir=self._staging) as directory:
            self.use(Path(directory))
            yield Path(directory)
        self._directory = None

    def use(self, directory: Path) -> None:
        """Write objects to a directory that another object of the same repository has staged."""
        database = pygit2.Odb()
        database.add_backend(pygit2.OdbBackendLoose(str(directory), -1, False), 1)
        database.add_disk_alternate(str(self._objects))
        self._git.set_odb(database)
        self._directory = directory

    def adopt(self, grow: Callable[[int], None]) -> None:
        """Move the staged objects into the repository. `grow` is called with their bytes on the disk before."""
        if self._directory is None:  # the repository is not visible yet
            return
        new = list(self._directory.glob("??/*"))
        grow(sum(occupied(path.stat().st_size) for path in new))
        for path in new:
            retry_reading(partial(self._move, path))

    def _move(self, path: Path) -> None:
        target = self._objects / path.parent.name / path.name
        try:
            path.rename(target)
        except FileNotFoundError:
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
