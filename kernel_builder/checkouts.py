"""Untrusted git repositories: git runs none of their programs.

A repository's configuration names programs (file system monitors, filters, hooks, servers of missing objects), and can
replace one commit by another. The commands here override the configuration.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The user's configuration, such as `safe.directory`, applies. These settings override the repository's.
_CONFIGURATION = (
    "core.fsmonitor=false",
    f"core.hooksPath={os.devnull}",
    "core.commitGraph=false",
    # A committed directory with the files of a repository is not a repository.
    "safe.bareRepository=explicit",
)
_LINK, _SUBMODULE = "120000", "160000"
# No filter and no conversion changes the files of a checkout.
_ATTRIBUTES = "* -text -filter -ident -working-tree-encoding\n"


def _run(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run git without GIT_DIR and similar variables of the environment."""
    settings = (part for setting in _CONFIGURATION for part in ("-c", setting))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_GRAFT_FILE": os.devnull,
        # Other git commands may run in the work tree.
        "GIT_OPTIONAL_LOCKS": "0",
        # Missing objects are not fetched, since the repository names the program; git before 2.45 knows the second.
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_TERMINAL_PROMPT": "0",
        **variables,
    }
    command = ["git", *settings, "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, check=False, env=environment)


def git_output(directory: Path, *arguments: str) -> bytes | None:
    """Return the output of git in a directory, or None if it fails."""
    done = _run(directory, *arguments)
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True)
class CommittedEntry:
    """A file, symbolic link or submodule of a commit, with git's mode and the object's name."""

    mode: str
    name: str

    @property
    def is_submodule(self) -> bool:
        return self.mode == _SUBMODULE

    def is_file(self, path: Path) -> bool:
        """Return whether a file or symbolic link has the same content."""
        try:
            link = path.is_symlink()
            content = os.fsencode(path.readlink()) if link else path.read_bytes()
        except OSError:
            return False
        algorithm = "sha256" if len(self.name) == 64 else "sha1"
        blob = hashlib.new(algorithm, b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()
        return link == (self.mode == _LINK) and blob == self.name


def committed_files(repository: Path, commit: str) -> Mapping[str, CommittedEntry] | None:
    """Return path -> entry of all files of a commit, or None if git cannot read it."""
    listed = git_output(repository, "ls-tree", "-r", "-z", "--full-tree", commit)
    if listed is None:
        return None
    entries = {}
    for line in filter(None, listed.split(b"\0")):
        about, _, path = line.partition(b"\t")
        mode, _, name = about.decode().split(" ")
        entries[os.fsdecode(path)] = CommittedEntry(mode, name)
    return entries


def check_out(repository: Path, commit: str, target: Path) -> str | None:
    """Write the files of a commit to a new directory, unchanged by filters; return git's error, or None.

    The directory is a repository of its own, without objects. Submodules are empty directories.
    """
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit):  # packages name it, and git could take it for an option
        return "not the name of a commit"
    objects = git_output(repository, "rev-parse", "--path-format=absolute", "--git-path", "objects")
    target.mkdir()
    for command in (["init", "--quiet"], ["checkout", "--quiet", "--detach", commit]):
        alternates = os.fsdecode(objects or b"").rstrip("\n")
        done = _run(target, *command, GIT_ALTERNATE_OBJECT_DIRECTORIES=alternates)
        if done.returncode:
            return done.stderr.decode(errors="replace").strip()
        (target / ".git" / "info").mkdir(exist_ok=True)
        (target / ".git" / "info" / "attributes").write_text(_ATTRIBUTES)
    return None
