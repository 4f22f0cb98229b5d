"""Check that the package has the layout and the metadata of the Kernel Hub, and the files of its digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from kernels_data import Digest, DigestValidationError, DigestViolation, Metadata

from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable
from kernel_builder.config.variant import Noarch
from kernel_format.files import LFS_POINTER
from kernel_format.metadata import PackageMetadata
from kernel_format.untrusted_paths import UnsafePath, publishable_tree

_REBUILD = "build the package again"
_VIOLATIONS: Mapping[type, str] = {
    DigestViolation.MissingFile: "is in the digest of metadata.json but not in the package",
    DigestViolation.UnknownFile: "is in the package but not in the digest of metadata.json",
    DigestViolation.HashMismatch: "has another SHA-256 than the digest of metadata.json",
}


def check_layout(package: CheckedPackage) -> Iterator[Finding]:
    if package.variant is None:
        yield _finding(
            ".",
            f"{package.directory.name!r} is not a variant's name",
            "`kernel-builder list-variants DIR` lists the names of a project's variants",
        )
    yield from _files(package)
    yield from _required(package)
    if package.metadata is None:
        problem = "is missing, is larger than 1 MB, is not a JSON object, or has invalid `kernel-depends`"
        yield _finding("metadata.json", problem)
    else:
        yield from _metadata(package, package.metadata)


def _finding(path: str, message: str, hint: str = _REBUILD) -> Finding:
    return Finding(message, hint, path=path)


def _required(package: CheckedPackage) -> Iterator[Finding]:
    required = ["__init__.py", "_ops.py"]
    if package.metadata and package.metadata.python_name:
        # Old clients look for the package here, unless a module of the kernel has taken the name.
        name = package.metadata.python_name
        required += [f"{name}/__init__.py"] if not (package.directory / f"{name}.py").is_file() else []
    for path in required:
        if not (package.directory / path).is_file():
            yield _finding(path, "is missing")
    noarch = package.variant is not None and isinstance(package.variant.framework, Noarch)
    count = len(package.binary_paths)
    if noarch and count:
        yield _finding(package.binary_paths[0].name, "is a binary in a variant that is Python only")
    elif not noarch and count != 1:
        names = ", ".join(path.name for path in package.binary_paths) or "none"
        yield _finding(".", f"expected exactly one binary, found {names}")


def _files(package: CheckedPackage) -> Iterator[Finding]:
    """Report files that no package may contain."""
    every = sorted(package.directory.rglob("*"))
    try:
        publishable_tree(path.relative_to(package.directory).as_posix() for path in every)
    except UnsafePath as error:
        yield _finding(".", str(error), "rename the file")
    for path in every:
        name = path.relative_to(package.directory).as_posix()
        if path.is_symlink():
            yield _finding(name, "is a symbolic link, which the Hub does not store", "replace it by the file")
        elif not (path.is_file() or path.is_dir()):
            yield _finding(
                name, "is neither a file nor a directory, but a pipe, a socket or a device", f"delete {name}"
            )
        elif path.name == "__pycache__" or path.match("__pycache__/*.pyc"):
            continue  # Python writes it where a package is tried out. It is not published.
        elif path.suffix in (".pyc", ".pyo"):
            yield _finding(name, "is bytecode, which only one version of Python can use", f"delete {name}")
        elif "__pycache__" in path.parent.parts[len(package.directory.parts) :]:
            yield _finding(name, "is in a directory for bytecode", f"delete {name}")
        elif path.name.startswith("."):
            yield _finding(name, "is a hidden file", f"delete {name}")
        elif path.is_file() and _starts_with(path, LFS_POINTER):
            yield _finding(name, "is a pointer of git-lfs, and not the file's content", "run `git lfs pull`, and build")
        elif path.is_file() and path not in package.binary_paths and _starts_with(path, b"\x7fELF", b"!<arch>"):
            yield _finding(
                name,
                "is object code besides the kernel's own binary",
                "compile it into the kernel through `src`, and leave its file type out of `pyext` in build.toml",
            )


def _starts_with(path: Path, *starts: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(max(map(len, starts))).startswith(starts)


def _metadata(package: CheckedPackage, metadata: PackageMetadata) -> Iterator[Finding]:
    name, variant = "metadata.json", package.variant
    try:
        Metadata.read_from_file(package.directory / name)
    except ValueError as error:
        reason = str(error).splitlines()[0].partition("`: ")[2] or str(error)
        yield _finding(name, f"the package `kernels-data` cannot read it: {reason}")
        return
    if variant and metadata.backend != variant.backend.name:
        yield _finding(name, f"`backend.type` is {metadata.backend!r}, the variant is for {variant.backend}")
    if variant and variant.platform and variant.backend.archs_key and not metadata.archs:
        reason = "the client could not refuse a device that it does not support"
        yield _finding(name, f"`backend.archs` is missing or empty: {reason}")
    identifier = metadata.id or ""
    start = f"_{metadata.python_name}_{metadata.backend}_"
    if not identifier.startswith(start) or identifier == start or not identifier.isidentifier():
        reason = "two kernels with one id cannot be loaded together"
        yield _finding(name, f"`id` is {identifier!r}, expected {start}<unique>; {reason}")
    ops = package.directory / "_ops.py"
    if ops.is_file() and identifier not in ops.read_text(encoding="utf-8", errors="replace"):
        yield _finding("_ops.py", f"does not register operators under the `id` of metadata.json, {identifier}")


def check_digest(package: CheckedPackage) -> Iterator[Finding]:
    """Check that the files of a package match the digest in its metadata."""
    if package.known_metadata.digest is None:
        yield _finding("metadata.json", "has no `digest` of the package's files")
        return
    try:
        expected = Metadata.read_from_file(package.directory / "metadata.json").digest
    except ValueError as error:
        raise NotApplicable(str(error)) from error
    assert expected is not None
    try:
        expected.validate(Digest.hash_variant(expected.algorithm, package.directory))
    except DigestValidationError as error:
        for violation in error.violations:
            message = _VIOLATIONS.get(type(violation), str(violation))
            hint = "build the package again, and do not edit its files"
            yield _finding(getattr(violation, "path", "metadata.json"), message, hint)
