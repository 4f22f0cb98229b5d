"""Binaries -> `build/<variant>/`: the package as the public client loads it, with its metadata and digest.

A package is assembled in a staging directory beside its destination, and the whole of `build/` is swapped in one
system call, so that at no moment there is a package that is half old and half new. Where `build/` itself cannot be
moved, its packages are swapped one by one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import string
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import kernel_builder
from kernel_builder.build.include_scan import read_unchanged
from kernel_builder.build.plan import PlannedVariant, digest
from kernel_builder.config.project import KernelDependency, Project
from kernel_builder.errors import PackageError

# The signature of a package's metadata, and with it of its digest, beside it.
SIGNATURE = "metadata.json.sigstore"
# Raise when a change here changes the files of a package for equal inputs.
_RECIPE = 1


@dataclass(frozen=True)
class GitState:
    """The commit that sources came from, and whether any of them differs from it."""

    commit: str
    dirty: bool

    def as_dict(self) -> dict[str, Any]:
        return {"commit": self.commit, "dirty": self.dirty}


def git_state(directory: Path, files: Sequence[str] = (".",)) -> GitState | None:
    """The git state of some files of a directory, or None where there is no git, repository or commit.

    Files that git does not know count as differing if they are named: they went into the build, and no commit has them.
    """

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(directory), *arguments]
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        except FileNotFoundError:
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git("rev-parse", "--verify", "HEAD")
    status = git("status", "--porcelain", "--ignored", "--", *files) if commit else None
    if commit is None or status is None:
        return None
    return GitState(commit.strip(), bool(status.strip()))


def builder_origin(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a package records of its builder.

    Args:
        state: `GitState.as_dict` of a builder in a git checkout, else empty.
    """
    # The public client wants a version. That of an editable install is the version it was installed at, and depends on
    # the tags that a clone has, so a checkout records its commit as the version: equal sources give equal bytes.
    version = f"0+g{state['commit'][:12]}" if state else kernel_builder.__version__
    return {"version": version, **state}


def provenance(project: Project) -> dict[str, Any]:
    """Which builder made a package, from which commit of the sources."""
    here = Path(kernel_builder.__file__).parent
    own = git_state(here, (".", ":(exclude,glob)**/__pycache__/**")) if (here.parent / ".git").exists() else None
    recorded: dict[str, Any] = {"kernel-builder": builder_origin(own.as_dict() if own else {})}
    inputs = {"build.toml", *(str(path.relative_to(project.root)) for _, path in project.python_files)}
    for part in [project.framework, *project.kernels]:
        inputs.update(getattr(part, "src", ()))
    kernel = git_state(project.root, sorted(inputs))
    if kernel:
        recorded["kernel"] = kernel.as_dict()
    return recorded


def _dependency(depend: KernelDependency) -> dict[str, Any]:
    pinned = {"version": depend.version} if depend.version is not None else {"revision": depend.revision}
    return {"repo-id": depend.repo_id, **pinned}


def metadata(planned: PlannedVariant, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `metadata.json`, without the digest."""
    project, backend = planned.project, planned.variant.backend
    depends = [*project.python_depends, *project.backend_python_depends.get(backend, ())]
    kernel_depends = [*project.kernel_depends, *project.backend_kernel_depends.get(backend, ())]
    content: dict[str, Any] = {
        "id": planned.module,
        "name": project.name,
        "version": project.version,
        "license": project.license,
        "python-depends": depends,
        "backend": {"type": backend, **({"archs": list(planned.archs)} if planned.archs else {})},
        "provenance": dict(recorded),
    }
    if kernel_depends:
        content["kernel-depends"] = [_dependency(depend) for depend in kernel_depends]
    for key, value in (("upstream", project.upstream), ("source", project.source)):
        if value:
            content[key] = value
    return content


def package_key(planned: PlannedVariant, recorded: Mapping[str, Any]) -> str:
    """Names the content of a package: equal keys, equal files."""
    binary = planned.binary.key if planned.binary else None
    templates = [_template(name) for name in ("_ops.py", "_ops_noarch.py", "compat_init.py")]
    # The module's name stands for the content of the Python files.
    return digest("package", _RECIPE, planned.variant.name, binary, metadata(planned, recorded), templates)


def _template(name: str) -> str:
    return (resources.files("kernel_builder") / "templates" / name).read_text()


def assemble(planned: PlannedVariant, binary: Path | None, recorded: Mapping[str, Any], directory: Path) -> None:
    """Write a package into `directory`, which must not exist.

    Raises:
        PackageError: If a file of the project takes a name that the builder needs.
        BuildError: If a Python file of the project is not what it was when the build was planned.
    """
    from kernels_data import Digest, DigestAlgorithm

    project = planned.project
    (directory / project.python_name).mkdir(parents=True)
    names = {"namespace": planned.module}
    ops = _template("_ops.py" if binary else "_ops_noarch.py")
    generated = {
        "_ops.py": string.Template(ops).substitute(names),
        f"{project.python_name}/__init__.py": string.Template(_template("compat_init.py")).substitute(names),
    }
    for name, content in generated.items():
        (directory / name).write_text(content, encoding="utf-8")
    for name, source in project.python_files:
        target = directory / name
        if target.exists():
            raise PackageError(
                f"the builder writes {name} itself",
                where=str(source),
                hint="give the file another name",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(read_unchanged(source, planned.python[name]))
    if binary is not None:
        shutil.copyfile(binary, directory / f"{planned.module}.abi3.so")
        (directory / f"{planned.module}.abi3.so").chmod(0o755)
    computed = Digest.hash_variant(DigestAlgorithm.SHA256, directory)
    described = metadata(planned, recorded)
    described["digest"] = {"algorithm": "sha256", "files": dict(sorted(computed.files.items()))}
    (directory / "metadata.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class TreeDigest:
    """SHA-256 of every file of a package (its path -> hex digits), and one over them all.

    `value` is the SHA-256 of what `sha256sum` prints for the files in the order of their paths, so that
    `cd DIR && find * -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum` gives the same.
    """

    value: str
    files: dict[str, str]


def hash_tree(directory: Path) -> TreeDigest:
    """The digest of all files under `directory` but Python's bytecode and a signature, `metadata.json` included.

    Two packages have the same value when and only when they are equal to the bit, signed or not: no two signatures of
    the same bytes are the same.
    """
    paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc")
    names = sorted(path.as_posix() for path in paths if "__pycache__" not in path.parts and str(path) != SIGNATURE)
    files = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}
    lines = "".join(f"{digest}  {path}\n" for path, digest in files.items())
    return TreeDigest(hashlib.sha256(lines.encode()).hexdigest(), files)


@contextmanager
def staging(destination: Path) -> Iterator[Path]:
    """A directory from which `publish` moves packages to `destination`, removed at the end.

    It lies beside `destination`, or inside it where one cannot take the other's place. One build at a time has one;
    what killed builds left goes first.
    """
    parent = destination.parent if _can_be_swapped(destination) else destination
    prefix = f".{destination.name}.staging-"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _alone(parent):
            for previous in parent.glob(f".{destination.name if parent != destination else '*'}.previous"):
                _take_back(previous)
            for stale in parent.glob(f"{prefix}*"):
                shutil.rmtree(stale, ignore_errors=True)
            directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)
    except OSError as error:
        raise _unwritable(error, parent) from error


def _can_be_swapped(destination: Path) -> bool:
    """Whether a directory beside `destination` can take its place.

    It cannot where `destination` is a mount point, such as a volume of a container, or its parent cannot be written;
    and it must not where the user is in it, whose shell would be left in the old one.
    """
    if not destination.exists():
        return True
    if Path.cwd().is_relative_to(destination):
        return False
    return os.access(destination.parent, os.W_OK) and _mount(destination) == _mount(destination.parent)


def _mount(directory: Path) -> str:
    """Names the mount that a directory is in. Device numbers do not tell a bind mount from the rest of its device."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        match = re.search(r"^mnt_id:.*", Path(f"/proc/self/fdinfo/{descriptor}").read_text(), re.M)
        return match[0] if match else str(os.fstat(descriptor).st_dev)
    finally:
        os.close(descriptor)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Holds a lock on a directory, which builds with other caches know of, too."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot; builds with one cache have a lock there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _unwritable(error: OSError, path: Path) -> PackageError:
    return PackageError(
        f"the package cannot be written: {error.strerror}",
        where=str(error.filename or path),
        hint="free some space, change the permissions, or choose another place with --out; what was there is as it was",
    )


def publish(staged: Path, destination: Path, *, replace_all: Sequence[str]) -> None:
    """Put the packages of `staged` in place of `destination`, all at once, or each at once if `staged` is inside it.

    Args:
        staged: Holds the new packages, one directory for each; it is consumed.
        destination: The `build` directory, no link; made if missing.
        replace_all: Names in `destination` that go unless `staged` has them: packages of this project that this build
            no longer makes. Everything else that lies there is kept.
    """
    staged.chmod(0o777 & ~_umask())
    if not destination.exists():
        staged.rename(destination)
        return
    made = sorted(path.name for path in staged.iterdir())
    if staged.parent == destination:
        for name in made:
            _exchange(staged / name, destination / name)
        for name in set(replace_all).difference(made):
            (destination / name).rename(staged / name)
        return
    for entry in sorted(destination.iterdir()):
        if entry.name not in {*replace_all, *made}:
            _link_tree(entry, staged / entry.name)
    _exchange(staged, destination)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _link_tree(source: Path, target: Path) -> None:
    """A copy that shares file content with the original where the file system can."""

    def link(original: str, copy: str) -> None:
        try:
            os.link(original, copy)
        except OSError:
            shutil.copy2(original, copy)

    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=link)
    elif source.is_symlink():
        target.symlink_to(source.readlink())
    else:
        link(str(source), str(target))


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _exchange(first: Path, second: Path) -> None:
    """Swap two directories in one step; on file systems that cannot, in two, which `staging` takes back if cut off.

    If there is no `second` yet, `first` becomes it.
    """
    if not os.path.lexists(second):
        first.rename(second)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if done != 0:
        previous = second.with_name(f".{second.name}.previous")
        try:
            second.rename(previous)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            # A directory of a container's image cannot be moved, only copied and removed.
            copy = first.with_name(f"{first.name}-previous")
            shutil.copytree(second, copy, symlinks=True)
            copy.rename(previous)
            shutil.rmtree(second)
        try:
            first.rename(second)
        except OSError:
            previous.rename(second)
            raise
        previous.rename(first)


def _take_back(previous: Path) -> None:
    """Undo a swap in two steps that was cut off; of the two directories, this one is whole at any moment."""
    original = previous.with_name(previous.name[1:].removesuffix(".previous"))
    if original.exists():
        shutil.rmtree(original)
    previous.rename(original)
