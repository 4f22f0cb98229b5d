"""Untrusted git repositories: git runs none of their programs, and the objects of a commit are verified.

A repository's configuration names programs (file system monitors, filters, hooks, servers of missing objects), and its
files can replace one commit by another (replaced objects, a commit graph, objects whose name is not their hash). This
module overrides the configuration, and computes the hashes of all objects that it reads.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO

# The user's configuration, such as `safe.directory`, applies. These settings override the repository's.
_CONFIGURATION = (
    "core.fsmonitor=false",
    f"core.hooksPath={os.devnull}",
    "core.commitGraph=false",
    # A committed directory with the files of a repository is not a repository.
    "safe.bareRepository=explicit",
)
_DIRECTORY, _EXECUTABLE, _LINK, _SUBMODULE = 0o40000, 0o100755, 0o120000, 0o160000


class ForgedObjectError(Exception):
    """An object of a repository is missing, or its content does not match its name."""


def git_environment() -> dict[str, str]:
    """Return the environment of git in an untrusted repository, without GIT_DIR and similar variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return environment | {
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_GRAFT_FILE": os.devnull,
        # Other git commands may run in the work tree.
        "GIT_OPTIONAL_LOCKS": "0",
        # Missing objects are not fetched, since the repository names the program; git before 2.45 knows the second.
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_TERMINAL_PROMPT": "0",
    }


def git_command(directory: Path, *arguments: str) -> list[str]:
    """Return a git command for a directory, which is to run with `git_environment()`."""
    settings = (part for setting in _CONFIGURATION for part in ("-c", setting))
    return ["git", *settings, "-C", str(directory), *arguments]


def git_output(directory: Path, *arguments: str) -> bytes | None:
    """Return the output of git in a directory, or None if it fails.

    Raises:
        FileNotFoundError: If git is not installed.
    """
    command = git_command(directory, *arguments)
    done = subprocess.run(command, capture_output=True, check=False, env=git_environment())
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True)
class CommittedEntry:
    """An entry of a commit.

    Attributes:
        mode: As git writes it.
        name: The name of the object: of a file, the text of a link, a directory, or the commit of a submodule.
    """

    mode: int
    name: str

    def is_file(self, path: Path) -> bool:
        """Return whether a file or symbolic link has the same content."""
        try:
            link = path.is_symlink()
            content = os.fsencode(path.readlink()) if link else path.read_bytes()
        except OSError:
            return False
        return link == (self.mode == _LINK) and _object_name(b"blob", content, len(self.name)) == self.name


@dataclass(frozen=True)
class CommittedFiles:
    """The files of a commit. Use `committed_files`, which opens the repository."""

    commit: str
    _requests: int
    _answers: IO[bytes]
    _directories: dict[str, dict[bytes, CommittedEntry]] = field(default_factory=dict)

    def entry(self, path: str) -> tuple[CommittedEntry | None, str]:
        """Return the entry at a path, and an empty text; in a submodule, its entry and the path inside it.

        Raises:
            ForgedObjectError: If a directory on the way is missing or forged.
        """
        entry: CommittedEntry | None = self._root
        parts = path.split("/")
        for number, part in enumerate(parts):
            if entry is None or entry.mode != _DIRECTORY:
                inside = entry is not None and entry.mode == _SUBMODULE
                return (entry, "/".join(parts[number:])) if inside else (None, "")
            entry = self._directory(entry.name).get(os.fsencode(part))
        return entry, ""

    def write(self, target: Path) -> None:
        """Write all files to a new directory, as the commit has them. Submodules are empty directories.

        Raises:
            ForgedObjectError: If an object is missing or forged, or a name leads out of its directory.
        """
        directories = [(self._root.name, target)]
        while directories:
            tree, directory = directories.pop()
            directory.mkdir()
            for name, entry in self._directory(tree).items():
                path = directory / os.fsdecode(name)
                if entry.mode == _DIRECTORY:
                    directories.append((entry.name, path))
                elif entry.mode == _SUBMODULE:
                    path.mkdir()
                elif entry.mode == _LINK:
                    path.symlink_to(os.fsdecode(self._content(entry.name, b"blob")))
                else:
                    path.write_bytes(self._content(entry.name, b"blob"))
                    path.chmod(0o755 if entry.mode == _EXECUTABLE else 0o644)

    @cached_property
    def _root(self) -> CommittedEntry:
        first = self._content(self.commit, b"commit").partition(b"\n")[0]
        return CommittedEntry(_DIRECTORY, first.removeprefix(b"tree ").decode("ascii", "replace"))

    def _directory(self, tree: str) -> dict[bytes, CommittedEntry]:
        if tree not in self._directories:
            entries: dict[bytes, CommittedEntry] = {}
            rest, size = self._content(tree, b"tree"), len(self.commit) // 2
            while rest:
                about, _, rest = rest.partition(b"\0")
                mode, _, name = about.partition(b" ")
                odd = name in {b"", b".", b".."} or b"/" in name or name.lower() == b".git"
                if odd or name in entries or not mode or mode.strip(b"01234567"):
                    raise ForgedObjectError(
                        f"the commit {self.commit[:12]} has an entry {about!r}, which git does not make"
                    )
                entries[name] = CommittedEntry(int(mode, 8), rest[:size].hex())
                rest = rest[size:]
            self._directories[tree] = entries
        return self._directories[tree]

    def _content(self, name: str, kind: bytes) -> bytes:
        try:
            os.write(self._requests, name.encode() + b"\n")
        except BrokenPipeError:
            raise ForgedObjectError("git reads no objects here") from None
        _, answered, size = (*self._answers.readline().split(), b"", b"", b"")[:3]
        if answered != kind or not size.isdigit():
            raise ForgedObjectError(f"there is no {kind.decode()} {name[:12]}")
        content = self._answers.read(int(size) + 1)[:-1]
        if _object_name(kind, content, len(name)) != name:
            raise ForgedObjectError(f"the {kind.decode()} {name[:12]} does not match its name")
        return content


def _object_name(kind: bytes, content: bytes, length: int) -> str:
    """Return git's name of an object, by the hash whose names have this length."""
    algorithm = "sha256" if length == 64 else "sha1"
    return hashlib.new(algorithm, b"%b %d\0%b" % (kind, len(content), content), usedforsecurity=False).hexdigest()


@contextmanager
def committed_files(repository: Path, commit: str) -> Iterator[CommittedFiles]:
    """Open the files of a commit for the time of the context.

    Args:
        repository: A directory of a git repository.
        commit: The full name of a commit.

    Raises:
        FileNotFoundError: If git is not installed.
    """
    with subprocess.Popen(
        git_command(repository, "cat-file", "--batch"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=git_environment(),
    ) as process:
        assert process.stdin and process.stdout
        try:
            yield CommittedFiles(commit, process.stdin.fileno(), process.stdout)
        finally:
            process.kill()
