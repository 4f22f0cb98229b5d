"""An index of all repositories in SQLite: what lists, pages and quotas need, so that none opens every repository.

The repositories are the truth, and the index follows from them. A change leaves a mark before it begins, and
removes it after it has read the repository again. The mark of a killed process stays, and the next reader reads that
repository again. The file can be deleted while no server runs; the next one builds it anew.

Every process that uses the index holds `index.lock` shared, and the one that builds it holds it alone. So servers that
start at the same time build one index, and none replaces the file that another one has open.
"""

from __future__ import annotations

import fcntl
import logging
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from kernel_format.errors import HubError
from kernel_hub.storage.blobs import private_file

log = logging.getLogger("kernel_hub")  # of the standard library, since commands use the index as well

SCHEMA = 2
_BUSY_SECONDS = 30
_ABANDONED_SECONDS = 2.0  # a mark as old as this may be a killed process's, and its repository is read again
_FORGOTTEN_SECONDS = 600.0  # no change takes as long
_ALONE_SECONDS = 5.0  # the longest wait for others that leave an index which cannot be used


@dataclass(frozen=True)
class IndexedRepository:
    """What the index has of one repository. Times are in seconds since 1970."""

    repo_id: str
    organization: str
    private: bool
    commit: str  # of `main`
    modified: int  # when that was committed
    changed: int  # when `main` or the newest version was last committed
    versions: str  # the branches v1, v2 …, separated by spaces
    card: str  # the blob of the card, or ""
    summary: str  # the card's first paragraph
    bytes: int  # large files that were uploaded to it, and files in git
    former: str  # its former names, each with the time when it was given up: "a/one@1700000000", separated by spaces


_COLUMNS = ", ".join(f'"{field.name}"' for field in fields(IndexedRepository))
_PLACES = ", ".join("?" for _ in fields(IndexedRepository))


class RepositoryIndex:
    """The index in the file `path`.

    Args:
        path: The file; servers of one root share it.
        read: Reads a repository, given its id and what the index had. None: there is no such repository.
    """

    def __init__(self, path: Path, read: Callable[[str, IndexedRepository | None], IndexedRepository | None]) -> None:
        self._path = path
        self._read = read
        self._threads = threading.local()
        private_file(path.with_suffix(".lock"))
        self._users = path.with_suffix(".lock").open("a+b")  # closed, and so freed, with this object

    @property
    def _database(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._threads, "connection", None)
        if connection is None:
            private_file(self._path)  # it has the names and the cards of private repositories
            connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None)
            connection.execute("PRAGMA journal_mode = TRUNCATE")  # not WAL, which one machine alone can use
            connection.execute("PRAGMA synchronous = OFF")  # after a power failure the index is built anew
            connection.execute("PRAGMA cache_size = -1000")  # 1 MB for each thread
            self._threads.connection = connection
        return connection

    def prepare(
        self, repo_ids: Callable[[], Iterable[str]], xorb_sizes: Callable[[], Iterable[tuple[str, int]]]
    ) -> None:
        """Build the index from all repositories and xorbs, unless there is one that can be used.

        Raises:
            HubError: If the index is damaged, and other processes use it.
        """
        until = time.monotonic() + _ALONE_SECONDS
        while True:
            alone = self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not alone:
                self._lock(fcntl.LOCK_SH)  # waits for a process that builds the index
            if self._usable():
                break
            if alone:
                self._build(repo_ids(), xorb_sizes())
                break
            self._lock(fcntl.LOCK_UN)
            if time.monotonic() > until:
                raise HubError(
                    "the index is damaged or of another version, and other servers use it",
                    where=str(self._path),
                    hint="stop all servers of this root; the next one to start builds the index anew",
                )
            time.sleep(random.uniform(0, 0.1))  # at random, so that waiting servers do not block each other forever
        self._lock(fcntl.LOCK_SH)

    def _lock(self, kind: int) -> bool:
        """Lock `index.lock`, or change the kind of the lock; return whether that succeeded."""
        try:
            fcntl.flock(self._users, kind)
        except BlockingIOError:
            return False
        return True

    def _usable(self) -> bool:
        try:
            if self._database.execute("PRAGMA user_version").fetchone()[0] != SCHEMA:
                return False
            return bool(self._database.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
        except sqlite3.DatabaseError:
            return False

    def _build(self, repo_ids: Iterable[str], xorb_sizes: Iterable[tuple[str, int]]) -> None:
        began = time.monotonic()
        self._threads = threading.local()
        self._path.unlink(missing_ok=True)
        self._path.with_name(f"{self._path.name}-journal").unlink(missing_ok=True)
        columns = _COLUMNS.replace('"repo_id"', '"repo_id" PRIMARY KEY')
        self._database.executescript(
            f"""
            CREATE TABLE repositories ({columns});
            CREATE INDEX by_organization ON repositories (organization, repo_id);
            CREATE TABLE marks (id INTEGER PRIMARY KEY, repo_id TEXT, began REAL, since REAL);
            CREATE TABLE former_names (name TEXT PRIMARY KEY, repo_id TEXT, since INTEGER);
            CREATE TABLE xorbs (organization TEXT PRIMARY KEY, bytes INTEGER);
            """
        )
        count = 0
        for repo_id in repo_ids:
            self.refresh(repo_id)
            count += 1
        for name, size in xorb_sizes:
            self.grow_xorbs(name.partition("/")[0], size)
        self._database.execute(f"PRAGMA user_version = {SCHEMA}")
        if count:
            log.info("built the index of %d repositories in %.1f s", count, time.monotonic() - began)

    @contextmanager
    def changing(self, repo_id: str, stored: int = 0, *, freeing: bool = False) -> Iterator[None]:
        """Read a repository again at the end of the context, or later if this process is killed meanwhile.

        Args:
            repo_id: The repository.
            stored: Bytes that are stored in it; not counted if the context ends with an exception.
            freeing: Whether the change frees space. Then it is made though the disk may be too full for a mark.
        """
        mark: int | None = None
        try:
            now = time.time()
            statement = "INSERT INTO marks (repo_id, began, since) VALUES (?, ?, ?)"
            mark = self._database.execute(statement, (repo_id, now, now)).lastrowid
        except sqlite3.OperationalError:
            if not freeing:
                raise
        grown = 0
        try:
            yield
            grown = stored
        finally:
            try:
                self.refresh(repo_id, mark, grown=grown)
            except Exception as error:  # the change was made, and is acknowledged; a reader tries again
                log.warning("the index is behind at %s: %s", repo_id, error)

    def refresh(self, repo_id: str, mark: int | None = None, *, grown: int = 0, afresh: bool = False) -> None:
        """Read a repository again, and remove a mark.

        Args:
            grown: Bytes to count as stored in it.
            afresh: Measure its size instead of counting.
        """
        with self._writing() as database:
            known = self.find(repo_id)
            if known is not None:
                known = replace(known, bytes=known.bytes + grown)
            row = self._read(repo_id, None if afresh else known)
            if row is None:
                database.execute("DELETE FROM repositories WHERE repo_id = ?", (repo_id,))
            else:
                database.execute(f"INSERT OR REPLACE INTO repositories VALUES ({_PLACES})", tuple(vars(row).values()))
            self._name_formers(
                database, repo_id, "" if known is None else known.former, "" if row is None else row.former
            )
            if mark is not None:
                database.execute("DELETE FROM marks WHERE id = ?", (mark,))

    def _name_formers(self, database: sqlite3.Connection, repo_id: str, before: str, after: str) -> None:
        """Record former names of a repository. Of several repositories, the last that had a name is found by it."""
        if before == after:
            return
        database.execute("DELETE FROM former_names WHERE repo_id = ?", (repo_id,))
        for item in after.split():
            name, _, since = item.rpartition("@")
            database.execute(
                "INSERT INTO former_names VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "repo_id = excluded.repo_id, since = excluded.since WHERE excluded.since >= since",
                (name, repo_id, int(since)),
            )

    def moved_to(self, former: str) -> str | None:
        """Return the repository that had this name before, or None if none had it."""
        statement = "SELECT repo_id FROM former_names WHERE name = ?"
        row = self._database.execute(statement, (former,)).fetchone()
        return str(row[0]) if row else None

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Write in one transaction, begun before the repository is read: the last writer has the newest state."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            yield database
        except BaseException:
            if database.in_transaction:  # SQLite has ended it if the disk is full
                database.execute("ROLLBACK")
            raise
        database.execute("COMMIT")

    def _current(self) -> sqlite3.Connection:
        """Return the database, after the repositories that killed processes were changing were read again."""
        database, now = self._database, time.time()
        left = database.execute("SELECT id, repo_id, began FROM marks WHERE since < ?", (now - _ABANDONED_SECONDS,))
        try:
            for mark, repo_id, began in left.fetchall():
                # This reader reads it again; others do so only if the mark is still there when it is that old again.
                database.execute("UPDATE marks SET since = ? WHERE id = ?", (now, mark))
                self.refresh(repo_id, mark if now - began > _FORGOTTEN_SECONDS else None)
        except sqlite3.OperationalError as error:  # the disk is full; what the index has is nearly right
            log.warning("the index is behind: %s", error)
        return database

    def find(self, repo_id: str) -> IndexedRepository | None:
        """Return what the index has of a repository."""
        row = self._database.execute(f"SELECT {_COLUMNS} FROM repositories WHERE repo_id = ?", (repo_id,)).fetchone()
        return IndexedRepository(*row) if row else None

    def page(
        self,
        visible: Sequence[str] | None,
        *,
        within: Sequence[str] | None = None,
        search: str = "",
        organization: str = "",
        after: str = "",
        count: int,
    ) -> list[IndexedRepository]:
        """List repositories, sorted by their ids.

        Args:
            visible: The private repositories that are listed as well, or their organisations. None: all.
            within: The only repositories to list, or their organisations. None: all.
            search: A part of the id, in any case.
            organization: The only organisation to list.
            after: The id after which the list begins.
            count: The most repositories to list.
        """
        where, values = _visible(visible)
        where += " AND repo_id > ?"
        values.append(after)
        if within is not None:
            where += f" AND {_among(within)}"
            values += [*within, *within]
        if search:
            where += " AND instr(lower(repo_id), ?)"
            values.append(search.lower())
        if organization:
            where += " AND organization = ?"
            values.append(organization)
        statement = f"SELECT {_COLUMNS} FROM repositories WHERE {where} ORDER BY repo_id LIMIT ?"
        return [IndexedRepository(*row) for row in self._current().execute(statement, (*values, count))]

    def count(self, visible: Sequence[str] | None, organization: str) -> int:
        """Count the repositories of an organisation."""
        where, values = _visible(visible)
        statement = f"SELECT count(*) FROM repositories WHERE {where} AND organization = ?"
        return int(self._current().execute(statement, (*values, organization)).fetchone()[0])

    def organizations(self) -> list[str]:
        """List the organisations that have a repository."""
        return [row[0] for row in self._current().execute("SELECT DISTINCT organization FROM repositories ORDER BY 1")]

    # Sizes, for quotas

    def grow(self, repo_id: str, size: int) -> None:
        """Count bytes that were stored in a repository."""
        with self._counting(repo_id):
            self._database.execute("UPDATE repositories SET bytes = bytes + ? WHERE repo_id = ?", (size, repo_id))

    def grow_xorbs(self, organization: str, size: int) -> None:
        """Count bytes of parts of uploads, which an organisation's repositories share."""
        with self._counting(organization):
            self._database.execute(
                "INSERT INTO xorbs VALUES (?, ?) "
                "ON CONFLICT (organization) DO UPDATE SET bytes = max(0, bytes + excluded.bytes)",
                (organization, size),
            )

    @contextmanager
    def _counting(self, what: str) -> Iterator[None]:
        """Go on if the disk is too full to count: the bytes are stored, and `hub check` counts again."""
        try:
            yield
        except sqlite3.OperationalError as error:
            log.warning("the size of %s was not counted: %s", what, error)

    def sizes(self, repo_id: str) -> tuple[int, int, int]:
        """Return the bytes of a repository, of its organisation, and of all organisations."""
        organization = repo_id.partition("/")[0]
        statement = (
            "SELECT coalesce(sum(bytes) FILTER (WHERE repo_id = ?), 0), "
            "coalesce(sum(bytes) FILTER (WHERE organization = ?), 0), coalesce(sum(bytes), 0) FROM "
            "(SELECT repo_id, organization, bytes FROM repositories "
            "UNION ALL SELECT '', organization, bytes FROM xorbs)"
        )
        row = self._database.execute(statement, (repo_id, organization)).fetchone()
        return int(row[0]), int(row[1]), int(row[2])


def _visible(visible: Sequence[str] | None) -> tuple[str, list[str]]:
    if visible is None:
        return "1", []
    return f"(NOT private OR {_among(visible)})", [*visible, *visible]


def _among(what: Sequence[str]) -> str:
    """Return the condition that these organisations or repositories include one. It takes them twice."""
    places = ", ".join("?" for _ in what)
    return f"(organization IN ({places}) OR repo_id IN ({places}))"
