"""The sources of a project, which are published on `main`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from kernel_builder.checkouts import git_output
from kernel_builder.config import build_toml
from kernel_builder.config.ownership import in_text
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import check_names, excluded, ignored_by_rules, in_work_tree
from kernel_builder.hub.content import Content, RemoteFile
from kernel_builder.hub.publication import LARGE_FILE
from kernel_format.errors import ConfigError
from kernel_format.files import LFS_POINTER

# Without git's list, files of other kinds are not published.
_KNOWN = re.compile(r"(?s).*\.(pyi?|toml|md|c|cc|cpp|cxx|cuh?|hh?|hpp|hxx|inc|inl|hip|rs|lock)|(LICENSE|NOTICE)[^/]*")
_PRIVATE_KEY = re.compile(  # PEM and PGP, PuTTY, and the start of DER: PKCS #8, RSA, EC
    rb"(?s)-----BEGIN [A-Z ]*PRIVATE KEY( BLOCK)?-----|PuTTY-User-Key-File-\d"
    rb"|\A0(?:[\0-\x7f]|\x81.|\x82..)\x02\x01[\0\x01][\x02\x040]"
)
LARGEST_SOURCE = 10 << 20


def published_files(root: Path, *, largest: int = LARGEST_SOURCE) -> dict[str, Content]:
    """Return the files of a project that are published on `main`, by path.

    Hidden files, builds, wheels, bytecode and compile commands are excluded, and files that `.gitignore` excludes: by
    git if it tracks the project, or else only sources and texts are published. Symbolic links are published as the
    files that they point to, so that the published project needs no other directory.

    Raises:
        ConfigError: If a file is a private key, a pointer of git-lfs, larger than `largest`, or has a name that not
            every system can store.
    """
    root = Path(os.path.realpath(root))
    names = [
        name
        for name in sorted(_listed(root, root, PurePosixPath()))
        if (root / name).is_file()
        and in_work_tree(root, root / name)
        and name.parts[0] != "build"
        and not any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        and name.suffix not in (".pyc", ".whl")
        and name.name != "compile_commands.json"
    ]
    left_out = excluded(root, (root / name for name in names if os.path.realpath(root / name) != str(root / name)))
    files = {str(name): Content(root / name) for name in names if root / name not in left_out}
    check_names(root, files)
    for name, content in files.items():
        if refuse_private_key(root / name).startswith(LFS_POINTER):
            raise ConfigError(
                "is a pointer of git-lfs, and not the file's content", where=str(root / name), hint="run `git lfs pull`"
            )
        if content.size > largest:
            raise ConfigError(
                f"has {content.size} bytes; sources have at most {largest}",
                where=str(root / name),
                hint=f"list it in .gitignore, or publish it with --allow {LARGE_FILE}",
            )
    return files


def refuse_private_key(path: Path) -> bytes:
    """Return the start of a file that is to be published, and raise a ConfigError if it has a private key."""
    with path.open("rb") as file:
        start = block = file.read(LARGEST_SOURCE)
        while block:
            if _PRIVATE_KEY.search(block) or _PRIVATE_KEY.search(block.replace(b"\0", b"")):  # in UTF-16
                raise ConfigError("is a private key", where=str(path), hint="list it in .gitignore, and build again")
            more = file.read(LARGEST_SOURCE)
            block = more and b" " + block[-200:] + more
    return start


def check_complete(project: Project, files: Mapping[str, Content]) -> None:
    """Raise an error if the published files lack a source that `build.toml` lists."""
    listed = [*getattr(project.framework, "src", ()), *(path for kernel in project.kernels for path in kernel.src)]
    if missing := [path for path in dict.fromkeys(listed) if path not in files]:
        raise ConfigError(
            f"lists {', '.join(missing)}, which would not be published: git or .gitignore excludes them",
            where=str(project.root / build_toml.FILE),
            hint="take them out of .gitignore, or `git add --force` them",
        )


def with_marks(root: Path, names: Iterable[str]) -> list[str]:
    """Return the files with marks of `init`; backquotes are around an explanation of the mark."""
    return [name for name in names if re.search(rb"Not written yet(?!`)", (root / name).read_bytes())]


def with_names_of_owner(project: Project, files: Mapping[str, Content]) -> dict[str, Content]:
    """Return the files with the owner's repository names in `build.toml` and Markdown files.

    Packages built from the published project then load the kernels of the same owner.
    """
    named = dict(files)
    for path in files if project.renamed else ():
        if path == build_toml.FILE or path.endswith(".md"):
            text = (project.root / path).read_text(encoding="utf-8", errors="surrogateescape")
            named[path] = Content(in_text(project, text).encode(errors="surrogateescape"))
    return named


def is_in_git(root: Path) -> bool:
    """Return whether git tracks a file of a project, or its repository is the project's own."""
    own = git_output(root, "rev-parse", "--show-prefix") == b"\n"
    return own or bool(git_output(root, "ls-files", "--error-unmatch", "."))


def _listed(root: Path, directory: Path, name: PurePosixPath, above: tuple[Path, ...] = ()) -> Iterator[PurePosixPath]:
    """Yield the project paths of the entries in a directory, whose own path in the project is `name`."""
    answer = git_output(directory, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    entries = set(filter(None, os.fsdecode(answer or b"").split("\0")))
    if answer is None or not is_in_git(root):
        known = _known(directory)
        # A work tree around the project may exclude all of it, as that of a home directory in git.
        entries = known & entries if entries else known
    for entry in entries:
        path, target = directory / entry, Path(os.path.realpath(directory / entry))
        yield name / entry
        # A link to a directory above itself would be followed forever.
        endless = any(parent.is_relative_to(target) for parent in (directory, *above))
        if path.is_symlink() and path.is_dir() and in_work_tree(root, path) and not endless:
            yield from _listed(root, target, name / entry, (*above, directory))


def _known(directory: Path) -> set[str]:
    """Return the sources and texts in a directory that no `.gitignore` excludes."""
    environments = {path.parent for path in directory.rglob("pyvenv.cfg")}
    found = {
        path
        for path in directory.rglob("*")
        if _KNOWN.fullmatch(path.relative_to(directory).as_posix()) or (path.is_symlink() and path.is_dir())
        if environments.isdisjoint(path.parents)
    }
    return {path.relative_to(directory).as_posix() for path in found - ignored_by_rules(directory, found)}


def outdated(there: Mapping[str, RemoteFile], wanted: Mapping[str, Content]) -> Iterator[str]:
    """Return the files on `main` in the project's directories that the project no longer has.

    Files in other directories of `main` do not belong to the project and are kept.
    """
    own = {path.partition("/")[0] for path in wanted if "/" in path}
    return (path for path in there if "/" in path and path.partition("/")[0] in own and path not in wanted)
