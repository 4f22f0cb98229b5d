"""An index of all repositories in SQLite, for lists, pages and the quota, which otherwise opens all; and the quota.

The index follows from the repositories. A server reads all of them when it starts, and a repository again after each
change. A killed process may leave the index behind until the next start or `kernel-hub check`. Servers of one root
share the file.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Lock

from kernel_format.errors import HubError
from kernel_hub.refusals import Refusal
from kernel_hub.storage.disk import private_file

log = logging.getLogger("kernel_hub")  # of the standard library, since commands use the index as well

_BUSY_SECONDS = 30
Claim = Callable[[int], None]


@dataclass(frozen=True)
class IndexedRepository:
    """The entry of one repository. Times are in seconds since 1970."""

    repo_id: str
    organization: str
    private: bool
    commit: str = ""  # of `main`
    modified: int = 0  # the time of that commit
    changed: int = 0  # the time of the last commit of `main` or the newest version
    versions: str = ""  # the newest branches v1, v2 …, separated by spaces
    card: str = ""  # the blob of the card, or ""
    summary: str = ""  # the card's first paragraph
    bytes: int = 0  # large files that were uploaded to it, and files in git


Read = Callable[[str, "IndexedRepository | None", bool], "IndexedRepository | None"]
_COLUMNS = ", ".join(f'"{field.name}"' for field in fields(IndexedRepository))
_VALUES = ", ".join("?" for _ in fields(IndexedRepository))


class RepositoryIndex:
    """The index in the file `path`.

    Args:
        path: The file; servers of one root share it.
        read: Reads a repository, given its id, its old entry and whether to measure its size. It returns None if there
            is no such repository.

    Raises:
        HubError: If the file is damaged.
    """

    def __init__(self, path: Path, read: Read) -> None:
        self._path = path
        self._read = read
        self._threads = threading.local()
        columns = _COLUMNS.replace('"repo_id"', '"repo_id" PRIMARY KEY')
        try:
            self._database.execute(f"CREATE TABLE IF NOT EXISTS repositories ({columns})")
            self._database.execute("CREATE INDEX IF NOT EXISTS sizes ON repositories (bytes)")  # for their sum
            self._database.execute(f"SELECT {_COLUMNS} FROM repositories WHERE repo_id = ''")
        except sqlite3.DatabaseError as error:
            raise HubError(
                f"the index cannot be used: {error}",
                where=str(path),
                hint="stop all servers of this root and delete the file; the next server to start builds it again",
            ) from error

    @property
    def _database(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._threads, "connection", None)
        if connection is None:
            private_file(self._path)  # it has the names and the cards of private repositories
            connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None)
            connection.execute("PRAGMA journal_mode = TRUNCATE")  # WAL works on one machine only
            self._threads.connection = connection
        return connection

    def read_all(self, repo_ids: Iterable[str]) -> None:
        """Read all repositories, and forget those that no longer exist."""
        began = time.monotonic()
        existing = set(repo_ids)
        for repo_id in existing | {row[0] for row in self._database.execute("SELECT repo_id FROM repositories")}:
            self.refresh(repo_id, measure=True)
        log.info("read %d repositories in %.1f s", len(existing), time.monotonic() - began)

    @contextmanager
    def changing(self, repo_id: str) -> Iterator[None]:
        """Read a repository again at the end of the context.

        A failure is logged: the change was made, and must be acknowledged.
        """
        try:
            yield
        finally:
            try:
                self.refresh(repo_id)
            except Exception as error:
                log.warning("the index of %s is out of date until the next start: %s", repo_id, error)

    def refresh(self, repo_id: str, *, measure: bool = False) -> None:
        """Read a repository again, and measure its size, or keep the size that `grow` has counted.

        It is read without the lock of the database, which all writers need, and again if its entry changes meanwhile.
        """
        database = self._database
        while True:
            known = self.find(repo_id)
            row = self._read(repo_id, known, measure)
            with database:  # which commits, or rolls back
                database.execute("BEGIN IMMEDIATE")
                now = self.find(repo_id)
                grown = now.bytes - known.bytes if now and known else 0
                if now != (known and replace(known, bytes=known.bytes + grown)):
                    continue
                if row is None:
                    database.execute("DELETE FROM repositories WHERE repo_id = ?", (repo_id,))
                elif (row := replace(row, bytes=row.bytes + grown)) != now:
                    statement = f"INSERT OR REPLACE INTO repositories ({_COLUMNS}) VALUES ({_VALUES})"
                    database.execute(statement, tuple(vars(row).values()))
                return

    def rename(self, repo_id: str, new_id: str) -> None:
        """Rename an entry before its repository, whose size stays known: all writers would wait for a measurement."""
        statement = "UPDATE OR REPLACE repositories SET repo_id = ?, organization = ? WHERE repo_id = ?"
        self._database.execute(statement, (new_id, new_id.partition("/")[0], repo_id))

    def hide(self, repo_id: str) -> None:
        """Mark a repository as private, before it is made private.

        The value differs from that of `refresh`, so that another one in progress, which has read the repository before,
        notices the change.
        """
        self._database.execute("UPDATE repositories SET private = private + 2 WHERE repo_id = ?", (repo_id,))

    def find(self, repo_id: str) -> IndexedRepository | None:
        """Return the entry of a repository."""
        row = self._database.execute(f"SELECT {_COLUMNS} FROM repositories WHERE repo_id = ?", (repo_id,)).fetchone()
        return IndexedRepository(*row) if row else None

    def is_public(self, repo_id: str) -> bool:
        """Return whether a repository is listed, and not private."""
        statement = "SELECT 1 FROM repositories WHERE repo_id = ? AND NOT private"
        return self._database.execute(statement, (repo_id,)).fetchone() is not None

    def twin(self, repo_id: str) -> str | None:
        """Return the id of a repository that differs from this one in case only."""
        statement = "SELECT repo_id FROM repositories WHERE lower(repo_id) = lower(?) AND repo_id != ?"
        row = self._database.execute(statement, (repo_id, repo_id)).fetchone()
        return str(row[0]) if row else None

    def page(
        self, visible: Sequence[str] | None, *, search: str = "", organization: str = "", after: str = "", count: int
    ) -> list[IndexedRepository]:
        """List repositories, sorted by their ids.

        Args:
            visible: The organizations and repositories whose private repositories are listed. None: all.
            search: A part of the id.
            organization: List only this organization's.
            after: List only ids beyond this one.
            count: The most entries.
        """
        where, values = _visible(visible)
        statement = (
            f"SELECT {_COLUMNS} FROM repositories WHERE {where} AND repo_id > ? AND (? = '' OR organization = ?) "
            "AND instr(lower(repo_id), lower(?)) > 0 ORDER BY repo_id LIMIT ?"
        )
        rows = self._database.execute(statement, (*values, after, organization, organization, search, count))
        return [IndexedRepository(*row) for row in rows]

    def count(self, visible: Sequence[str] | None, organization: str) -> int:
        """Count the visible repositories of an organization."""
        where, values = _visible(visible)
        statement = f"SELECT count(*) FROM repositories WHERE {where} AND organization = ?"
        return int(self._database.execute(statement, (*values, organization)).fetchone()[0])

    def organizations(self) -> list[str]:
        """List the organizations that have a repository."""
        return [row[0] for row in self._database.execute("SELECT DISTINCT organization FROM repositories ORDER BY 1")]

    def grow(self, repo_id: str, size: int) -> None:
        """Count bytes before they are written to a repository, so that those of a failed change count as well."""
        try:
            self._database.execute("UPDATE repositories SET bytes = bytes + ? WHERE repo_id = ?", (size, repo_id))
        except sqlite3.OperationalError as error:  # the next start measures them
            log.warning("the size of %s was not counted: %s", repo_id, error)

    def stored_bytes(self) -> int:
        """Return the bytes of all repositories."""
        return int(self._database.execute("SELECT coalesce(sum(bytes), 0) FROM repositories").fetchone()[0])


def _visible(visible: Sequence[str] | None) -> tuple[str, list[str]]:
    if visible is None:
        return "1", []
    marks = ", ".join("?" for _ in visible)
    return f"(NOT private OR organization IN ({marks}) OR repo_id IN ({marks}))", [*visible, *visible]


class Allowances:
    """Space for uploads, in the quota and on the disk, which is claimed as bytes arrive, before they are written.

    Claims of this server's uploads in progress count like stored bytes. Announced sizes are compared with the free
    space only: a slow upload keeps no space from others.

    Args:
        quota: The most bytes that the Hub stores. None: no limit.
        reserve: The bytes that stay free on the disk, but at most a twentieth of it.
        index: Knows the stored bytes.
        staging: The directory of uploads in progress.
    """

    def __init__(self, quota: int | None, reserve: int, index: RepositoryIndex, staging: Path) -> None:
        self._quota = quota
        self._reserve = reserve
        self._index = index
        self._staging = staging
        self._claimed = 0
        self._lock = Lock()

    @contextmanager
    def claim(self) -> Iterator[Claim]:
        """Return a function that claims bytes of an upload as `check` does, until the context ends."""
        size = 0

        def grow(more: int) -> None:
            nonlocal size
            if more:
                size += more
                with self._lock:  # not while the database is read: the event loop needs it, too
                    self._claimed += more
                self.check(more, is_claimed=True)

        try:
            yield grow
        finally:
            with self._lock:
                self._claimed -= size

    def check(self, size: int, *, is_claimed: bool = False) -> None:
        """Check that so many bytes can be stored now, which may be claimed already.

        Raises:
            Refusal: If the quota would be exceeded.
            OSError: If the disk has too little space (ENOSPC).
        """
        disk = shutil.disk_usage(self._staging)  # without the claimed bytes, which are written
        if size > disk.free - min(self._reserve, disk.total // 20):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._staging))
        size = self._claimed + (0 if is_claimed else size)
        if self._quota is not None and (stored := self._index.stored_bytes()) + size > self._quota:
            message = f"this Hub has {stored} of at most {self._quota} bytes, and this would add {size}"
            advice = "delete something, or ask the operator for a larger quota"
            raise Refusal(413, f"{message}; {advice}", code="QuotaExceeded")
