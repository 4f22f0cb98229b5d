"""What a source file includes: which of the project's files, and whether Torch, CUDA or Python headers.

A compile step is keyed by the content of the files it reads, and staged into a directory that holds only those. So the
scan has to find every file of the project that a source can reach, and it may find too many: conditions are ignored. A
file that the scan missed is not staged, and the compiler says so instead of building from a file that no key covers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from kernel_builder.errors import BuildError, ConfigError

CUDA_SUFFIXES = frozenset({".cu"})
CXX_SUFFIXES = frozenset({".cc", ".cpp", ".cxx"})
HEADER_SUFFIXES = frozenset({".cuh", ".h", ".hh", ".hpp", ".hxx", ".inc", ".inl"})

# The first part of an include that Torch's include directories answer, in a wheel of any release.
_TORCH_ROOTS = frozenset({"ATen", "c10", "caffe2", "torch"})
# Headers that pull in <Python.h>.
_PYTHON_HEADERS = re.compile(r"Python\.h|pybind11/.*|torch/extension\.h|torch/python\.h|torch/csrc/python_headers\.h")

_COMMENT = re.compile(rb"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
_INCLUDE = re.compile(rb"^[ \t]*#[ \t]*(?:include|include_next|import)[ \t]*(?:<([^>\n]+)>|\"([^\"\n]+)\"|(\w))", re.M)


@dataclass(frozen=True)
class Scan:
    """What one source file can reach.

    Attributes:
        files: Project-relative paths of the source itself and the project's files it includes -> SHA-256, sorted.
        torch: Includes a Torch header.
        python: Includes `Python.h`, directly or through a Torch header.
        namespace: Some of the files speak of `TORCH_EXTENSION_NAME`.
    """

    files: tuple[tuple[str, str], ...]
    torch: bool
    python: bool
    namespace: bool


@dataclass(frozen=True)
class _File:
    digest: str
    angled: tuple[str, ...]
    quoted: tuple[str, ...]
    computed: bool
    namespace: bool


@lru_cache(maxsize=4096)
def _read(path: Path, _size: int, _mtime: int) -> _File:
    content = path.read_bytes()
    # Comments go, strings stay: a quote inside a comment must not start a string, nor the other way round.
    bare = _COMMENT.sub(lambda match: match[0] if match[0][:1] == b'"' else b" ", content)
    angled, quoted, computed = [], [], False
    for match in _INCLUDE.finditer(bare):
        if match[1]:
            angled.append(match[1].decode("utf-8", "replace").strip())
        elif match[2]:
            quoted.append(match[2].decode("utf-8", "replace").strip())
        else:
            computed = True
    return _File(
        digest=hashlib.sha256(content).hexdigest(),
        angled=tuple(angled),
        quoted=tuple(quoted),
        computed=computed,
        namespace=b"TORCH_EXTENSION_NAME" in bare,
    )


def read_unchanged(path: Path, expected: str) -> bytes:
    """The content of a project's file, whose SHA-256 was `expected` when the build was planned.

    Raises:
        BuildError: If it is another by now, or cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError:
        content = None
    if content is None or hashlib.sha256(content).hexdigest() != expected:
        raise BuildError("the file changed while it was being built", where=str(path), hint="run the build again")
    return content


def _facts(path: Path) -> _File:
    status = path.stat()
    return _read(path, status.st_size, status.st_mtime_ns)


def _inside(root: Path, candidate: PurePosixPath) -> str | None:
    """The project-relative name of a file that exists, with `..` resolved, or None if there is none in the project."""
    parts: list[str] = []
    for part in candidate.parts:
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part != ".":
            parts.append(part)
    name = "/".join(parts)
    return name if name and (root / name).is_file() else None


def _refuse_foreign(root: Path, name: str) -> None:
    """Refuse a header that is a link out of the project; the files that `build.toml` lists were looked at before."""
    if not Path(os.path.realpath(root / name)).is_relative_to(os.path.realpath(root)):
        raise ConfigError(
            "is a symbolic link out of the project",
            where=str(root / name),
            hint="copy what it points to into the project: a kernel is built from its own files only",
        )


def scan(
    root: Path,
    source: str,
    include: Sequence[str] = (),
    listed: Iterable[str] = (),
    generated: Mapping[str, str] = {},
) -> Scan:
    """Find what a source can reach.

    Args:
        root: The project's directory.
        source: The source, relative to `root`.
        include: The include directories given for it, relative to `root`.
        listed: The other files that `build.toml` lists beside it. They count only if some file includes a macro
            instead of a name, since then nothing short of a preprocessor knows which file is meant.
        generated: Names of headers that the builder provides -> content; they are not the project's.

    Raises:
        ConfigError: If a file includes another by an absolute path, or through a symbolic link out of the project.
    """
    found: dict[str, str] = {}
    torch = python = namespace = False
    queue = [source]
    while queue:
        name = queue.pop()
        if name in found:
            continue
        facts = _facts(root / name)
        found[name] = facts.digest
        namespace = namespace or facts.namespace
        if facts.computed:
            torch = True
            queue += listed
        for target, beside in [(t, False) for t in facts.angled] + [(t, True) for t in facts.quoted]:
            if target.startswith("/"):
                raise ConfigError(
                    f"includes {target} by an absolute path",
                    where=str(root / name),
                    hint="copy it into the project and include it by its name there: other machines do not have it",
                )
            places = ([PurePosixPath(name).parent] if beside else []) + [PurePosixPath(entry) for entry in include]
            ours = next((hit for place in places if (hit := _inside(root, place / target))), None)
            if ours is not None:
                _refuse_foreign(root, ours)
                queue.append(ours)
            elif target not in generated:
                torch = torch or target.split("/", 1)[0] in _TORCH_ROOTS
                python = python or _PYTHON_HEADERS.fullmatch(target) is not None
    return Scan(tuple(sorted(found.items())), torch, python, namespace)
