"""Reads the project in a directory: its `build.toml`, and the files that the `build.toml` names.

A symbolic link may lead out of the project as long as it stays in the git work tree that tracks the project, so that
projects of one repository can share files. The content is read through the link.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec

from kernel_builder.checkouts import excluded_by_rules, git_output
from kernel_builder.config import aot_toml, build_toml
from kernel_builder.config.ownership import owned_by
from kernel_builder.config.project import Project, TorchNoarch
from kernel_builder.config.toml_schema import TomlPlace
from kernel_format.errors import ConfigError
from kernel_format.untrusted_paths import MAX_DEPTH, UnsafePath, publishable_tree

_BYTECODE = (".pyc", ".pyo")
_TRACKED = ("--cached", "--recurse-submodules")
_OTHERS = ("--others", "--exclude-standard")
_AT_ONCE = 1000  # paths that git is given
_MOST_DIRECTORIES = 10_000


def read_project(directory: Path, owner: str | None = None, repo_id: str | None = None) -> Project:
    """Read and validate the project in `directory`.

    Args:
        owner: The publisher of it, and of the kernels of the same owner that it loads. None: as in `build.toml`.
        repo_id: The name of its repository; see `ownership`.

    Raises:
        ConfigError: If `build.toml` is missing or invalid, or a file that it names is missing or is a symbolic link out
            of the git work tree, or a back end that it lists lacks kernels, or if `owner` is not a name.
    """
    file = directory / build_toml.FILE
    project = build_toml.read(file, Path(os.path.realpath(directory)))
    _check_backends(project, TomlPlace(str(file), "general").at("backends"))
    framework = project.framework
    if not isinstance(framework, TorchNoarch):
        _check_files(project.root, framework.src, framework.include, TomlPlace(str(file), framework.table))
    for kernel in project.kernels:
        place = TomlPlace(str(file), f"kernel.{kernel.name}")
        _check_files(project.root, kernel.src, kernel.include, place)
        if kernel.cargo_manifest:
            _check_file(project.root, kernel.cargo_manifest, "file", Path.is_file, place.at("cargo-manifest"))
    package = directory / framework.package_directory / project.python_name
    project = replace(project, python_files=_python_files(project.root, package, framework.pyext))
    project = owned_by(project, owner, repo_id)
    return replace(project, ahead_of_time=aot_toml.compiled(project))


def _check_backends(project: Project, place: TomlPlace) -> None:
    """Raise an error for a back end with device code that no kernel has any for; the CPU's may be in `[torch] src`."""
    if isinstance(project.framework, TorchNoarch):
        return
    for backend in project.backends:
        is_compiled = backend.compiles and not backend.why_not_compiled(project)
        if is_compiled and backend.archs_key and all(kernel.backend is not backend for kernel in project.kernels):
            raise ConfigError(
                f"lists {backend.name}, but no [kernel.<name>] is for it, so its packages would have no device code",
                where=str(place),
                hint=f'add a [kernel.<name>] with language = "cpp-{backend.name}", which may list the sources of '
                f'another kernel, or remove "{backend.name}" from the list',
            )


def _check_files(root: Path, src: tuple[str, ...], include: tuple[str, ...], place: TomlPlace) -> None:
    """Raise an error for sources and include directories that are missing, or links that leave the work tree."""
    for key, paths, kind, exists in (
        ("src", src, "file", Path.is_file),
        ("include", include, "directory", Path.is_dir),
    ):
        for path in paths:
            _check_file(root, path, kind, exists, place.at(key))


def _check_file(root: Path, path: str, kind: str, exists: Callable[[Path], bool], place: TomlPlace) -> None:
    if not _holds(exists, root / path):
        raise ConfigError(f"there is no {kind} {path!r} in the project", where=str(place), hint=_missing(root, path))
    check_link(root, root / path, path, str(place))


def _missing(root: Path, path: str) -> str:
    """Return the hint for a missing file or directory."""
    within = (root / path).relative_to(root)
    for part in reversed((within, *within.parents)):
        if _holds(Path.is_symlink, root / part) and not _holds(Path.exists, root / part):
            return (
                f"{part} is a symbolic link that leads nowhere, as after `cp -r`: copy the project with `cp -rL`, or "
                "with `kernel-builder init --from PROJECT DIR`"
            )
    module = next((module for module in submodules(root) if PurePosixPath(path).is_relative_to(module)), None)
    if module:
        return f"{module} is a git submodule, and empty: run `git submodule update --init {module}`"
    return "create it or correct its name; names are relative to the directory of build.toml"


def submodules(root: Path) -> list[str]:
    """Return the git submodules of a project's repository, relative to the project."""
    top = work_tree(root)
    file = top / ".gitmodules"
    text = file.read_text(errors="replace") if file.is_file() else ""
    return [os.path.relpath(top / path, root) for path in re.findall(r"^\s*path\s*=\s*(\S+)", text, re.MULTILINE)]


def _holds(test: Callable[[Path], bool], path: Path) -> bool:
    try:
        return test(path)
    except OSError:  # for example a name that is longer than the file system allows
        return False


def work_tree(root: Path) -> Path:
    """Return the git work tree that tracks a project, or the project itself if there is none. `root` has no links.

    A project that lies in a foreign work tree, as of a home directory in git, may not use that tree's files.
    """
    top = next((parent for parent in (root, *root.parents) if (parent / ".git").exists()), root)
    return top if top == root or git_output(root, "ls-files", "--error-unmatch", ".") else root


def in_work_tree(root: Path, path: Path) -> bool:
    """Return whether `path` is in the work tree of the project `root`, when symbolic links are followed.

    git's own directory is not: its configuration may hold a token, as of a checkout on a build server.
    """
    real = Path(os.path.realpath(path))
    top = root if real.is_relative_to(root) else work_tree(root)
    return real.is_relative_to(top) and ".git" not in real.relative_to(top).parts


def excluded(root: Path, paths: Iterable[Path]) -> set[Path]:
    """Return the files of a project that are hidden or that git excludes, or without git a `.gitignore` of the project.

    A symbolic link is excluded with its target, and with one out of the project that git does not track.
    """
    places: dict[Path, list[Path]] = defaultdict(list)
    for path in paths:
        for place in {Path(os.path.realpath(path.parent), path.name), Path(os.path.realpath(path))}:
            places[place].append(path)
    inside = [place for place in places if place.is_relative_to(root)]
    kept = _listed_by_git(root, [place for place in places if in_work_tree(root, place)])
    # A work tree around the project may exclude all of it, as that of a home directory in git.
    if _listed_by_git(root, [root / build_toml.FILE]) or _listed_by_git(root, [root / build_toml.FILE], *_OTHERS):
        kept |= _listed_by_git(root, inside, *_OTHERS)
    else:
        kept |= set(inside) - ignored_by_rules(root, inside)
    kept -= {place for place in inside if any(part.startswith(".") for part in place.relative_to(root).parts)}
    return {path for place, of in places.items() if place not in kept for path in of}


def _listed_by_git(root: Path, places: Sequence[Path], *options: str) -> set[Path]:
    """Return those of some places, or the files below them, that a project's repository tracks.

    Those of submodules count, and not those of other repositories in the work tree. With `_OTHERS` it is the files that
    git would add.
    """
    found: set[Path] = set()
    for start in range(0, len(places), _AT_ONCE):
        names = [os.path.relpath(place, root) for place in places[start : start + _AT_ONCE]]
        listed = ("--literal-pathspecs", "ls-files", "-z", *(options or _TRACKED))
        answer = git_output(root, *listed, "--", *names)
        found |= {Path(os.path.normpath(root / name)) for name in os.fsdecode(answer or b"").split("\0") if name}
    return found


def ignored_by_rules(root: Path, paths: Collection[Path]) -> set[Path]:
    """Return those of some files that the `.gitignore` files of a directory exclude; git decides if it is installed."""
    if (found := excluded_by_rules(root, paths)) is not None:
        return found

    @cache
    def rules(directory: Path) -> GitIgnoreSpec:
        file = directory / ".gitignore"
        return GitIgnoreSpec.from_lines(file.read_text("utf-8-sig", "replace").splitlines() if file.is_file() else [])

    def is_ignored(path: Path, top: Path) -> bool:
        """Return whether the file of one directory excludes a path, or a directory around it, which is final."""
        name = path.relative_to(top)
        return any(rules(top).match_file(part) for part in (str(name), *(f"{above}/" for above in name.parents[:-1])))

    return {path for path in paths for top in path.parents if top.is_relative_to(root) and is_ignored(path, top)}


def check_link(root: Path, path: Path, name: str, where: str) -> None:
    """Raise an error if `path` is a symbolic link to a file or directory that the project may not use."""
    real = Path(os.path.realpath(path))
    if not in_work_tree(root, path) or not (real.is_relative_to(root) or _listed_by_git(root, [real])):
        raise ConfigError(
            f"{name!r} is a symbolic link out of the project to a path that its git repository does not track",
            where=where,
            hint="copy its target into the project, or `git add` both: other links may only point to files of the git "
            "repository that tracks the project",
        )


def own_directory(parent: Path, name: str) -> Path:
    """Return a directory of a project that commands write to, or raise a ConfigError if it is a link to another."""
    if (parent / name).is_symlink():
        raise ConfigError(
            "is a symbolic link, through which files of another project could be replaced",
            where=str(parent / name),
            hint="remove the link; --out names a destination outside of the project",
        )
    return parent / name


def files_below(root: Path, top: Path, endings: tuple[str, ...], left_out: str = r"\..*") -> Iterator[Path]:
    """Yield every file below a directory of a project that has one of `endings`, without hidden files and bytecode.

    Args:
        left_out: A regular expression for the names of other directories that are left out.

    Raises:
        ConfigError: If a link leads out of the git work tree or to a directory above it, or a file is a pipe or device.
    """
    for number, (folder, folders, files) in enumerate(os.walk(top, followlinks=True)):
        if number >= _MOST_DIRECTORIES or len(Path(folder).relative_to(top).parts) > MAX_DEPTH:
            raise ConfigError(
                f"has more than {_MOST_DIRECTORIES} directories, or more than {MAX_DEPTH} levels of them",
                where=str(top),
                hint="remove links between directories that form a loop",
            )
        folders[:] = [name for name in folders if name != "__pycache__" and not re.fullmatch(left_out, name)]
        wanted = [
            Path(folder, name)
            for name in files
            if name.endswith(endings) and not name.endswith(_BYTECODE) and not name.startswith(".")
        ]
        for path in wanted:
            if not path.is_file():  # reading a pipe may never end
                raise ConfigError(
                    "is not a file: a pipe, a socket, a device, a directory or a dangling link",
                    where=str(path),
                    hint="remove it",
                )
        for path in [*(Path(folder, name) for name in folders), *wanted]:
            if not path.is_symlink():
                continue
            check_link(root, path, path.name, str(path))
            if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path)):
                raise ConfigError("is a symbolic link to a directory above it", where=str(path), hint="remove the link")
        yield from wanted


def _python_files(root: Path, package: Path, pyext: tuple[str, ...]) -> tuple[tuple[str, Path], ...]:
    """Return the files of a Python package that end in one of `pyext`, without bytecode and excluded files."""
    check_link(root, package, package.name, str(package))
    endings = tuple(f".{ending}" for ending in pyext)
    found = list(files_below(root, package, endings))
    left_out = excluded(Path(os.path.realpath(root)), found)
    files = dict(sorted((path.relative_to(package).as_posix(), path) for path in found if path not in left_out))
    check_names(package, files)
    if "__init__.py" not in files:
        raise ConfigError(
            "is missing, or `pyext` or .gitignore excludes it; expected the kernel's Python package",
            where=str(package / "__init__.py"),
            hint='create it in a directory with the kernel\'s name, and keep "py" in `pyext`: users import it',
        )
    # A built package has a subdirectory of its own name, for old clients, unless it has a module of that name.
    reserved = {"_ops.py", "metadata.json", package.name}
    for taken in reserved & {name.partition("/")[0] for name in files}:
        raise ConfigError(
            "the builder writes a file or directory of this name into the package",
            where=str(package / taken),
            hint="rename it",
        )
    return tuple((name, root / path.relative_to(package.parent.parent)) for name, path in files.items())


def check_names(root: Path, names: Iterable[str]) -> None:
    """Raise a ConfigError for a file that a Hub, or another system, cannot store under its name."""
    try:
        publishable_tree(names)
    except UnsafePath as error:
        raise ConfigError(
            str(error), where=os.fsencode(root).decode(errors="backslashreplace"), hint="rename it"
        ) from None
