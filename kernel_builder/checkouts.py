"""Untrusted git repositories: git runs none of their programs.

A repository's configuration names programs (file system monitors, filters, hooks, servers of missing objects), and can
replace one commit by another. The commands here override the configuration.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_format.files import temporary_directory
from kernel_sandbox.programs import run_program

# The user's configuration, such as `safe.directory`, applies. These settings override it and the repository's.
_CONFIGURATION = (
    "core.fsmonitor=false",
    f"core.hooksPath={os.devnull}",
    "core.commitGraph=false",
    # A committed directory with the files of a repository is not a repository.
    "safe.bareRepository=explicit",
)
_LINK, _SUBMODULE, _TREE = "120000", "160000", b"40000"
# No filter and no conversion changes the files of a checkout.
_ATTRIBUTES = "* -text -filter -ident -working-tree-encoding\n"


def _run(directory: Path, *arguments: str, stdin: bytes = b"", **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run git without GIT_DIR and similar variables; those of the user's configuration (GIT_CONFIG_...) apply."""
    settings = (part for setting in _CONFIGURATION for part in ("-c", setting))
    environment = {name: value for name, value in os.environ.items() if not re.match("GIT_(?!CONFIG_)", name)}
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
    where = ("-C", str(directory.absolute()))
    return run_program("git", *settings, *where, *arguments, env=environment, stdin=stdin, seconds=None)


def git_output(directory: Path, *arguments: str) -> bytes | None:
    """Return the output of git in a directory, or None if it fails or is not installed."""
    try:
        done = _run(directory, *arguments)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def excluded_by_rules(root: Path, paths: Iterable[Path]) -> set[Path] | None:
    """Return those of some files that git would ignore if a directory were a new repository; None without git."""
    names = "\0".join(f"./{path.relative_to(root)}" for path in paths)
    with temporary_directory() as empty:
        if git_output(empty, "init", "--quiet") is None:
            return None
        places = (f"--git-dir={empty / '.git'}", "--work-tree=.")
        done = _run(root, *places, "check-ignore", "-z", "--stdin", stdin=os.fsencode(names))
    return {root / name for name in os.fsdecode(done.stdout).split("\0") if name} if done.returncode in (0, 1) else None


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
        return link == (self.mode == _LINK) and _object_name(b"blob", content, len(self.name)) == self.name


def committed_files(repository: Path, commit: str) -> Mapping[str, CommittedEntry] | None:
    """Return path -> entry of all files of a commit, or None if git cannot read it, or objects are not as named.

    Git compares few objects with their names when it reads them, and a repository may have others under these names.
    """
    if (contents := _objects(repository, [commit])) is None:
        return None
    folders, entries = {"": contents[0].split()[1].decode()}, {}
    while folders:
        if (contents := _objects(repository, list(folders.values()))) is None:
            return None
        below = {}
        for folder, content in zip(folders, contents, strict=True):
            for mode, name, raw in re.findall(rb"(\d+) ([^\0]+)\0(.{%d})" % (len(commit) // 2), content, re.DOTALL):
                path = folder + os.fsdecode(name)
                if mode == _TREE:
                    below[f"{path}/"] = raw.hex()
                else:
                    entries[path] = CommittedEntry(mode.decode(), raw.hex())
        folders = below
    return entries


def _objects(repository: Path, names: Sequence[str]) -> list[bytes] | None:
    """Return the contents of objects, or None if one is missing or has another name."""
    output = io.BytesIO(_run(repository, "cat-file", "--batch", stdin="\n".join(names).encode()).stdout)
    contents = []
    for name in names:
        about = output.readline().split()
        contents.append(output.read(int(about[-1]) if len(about) == 3 else 0))
        if len(about) != 3 or output.read(1) != b"\n" or _object_name(about[1], contents[-1], len(name)) != name:
            return None
    return contents


def _object_name(kind: bytes, content: bytes, digits: int) -> str:
    """Return git's name of an object, of 40 or 64 digits."""
    algorithm = "sha256" if digits == 64 else "sha1"
    return hashlib.new(algorithm, b"%b %d\0%b" % (kind, len(content), content), usedforsecurity=False).hexdigest()


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
    committed = committed_files(repository, commit)
    if committed is None or not all(of.is_submodule or of.is_file(target / path) for path, of in committed.items()):
        return "its files are not those that its objects name"
    return None
