"""The builder's cache of objects and binaries, and the directory in which a build works.

Outputs are named by content. An output takes its name by a rename, when it is whole. Its digest is beside it, so that
an output which a crash or a bad disk damages later is built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kernel_builder.steps.graph import Binary, CompileStep, Graph
from kernel_format.errors import StoreError
from kernel_format.files import debugging, discard, locked, remove_tree, write_atomically

# Outputs that no build has used for this long are removed; they can be built again.
_KEEP_SECONDS = 30 * 24 * 3600
_KEPT_LOGS = 100


def object_path(cache: Path, step: CompileStep) -> Path:
    """Return where the object of a compile step is kept."""
    return cache / "objects" / step.key[:2] / f"{step.key}.o"


def binary_path(cache: Path, binary: Binary) -> Path:
    """Return where a linked binary is kept."""
    return cache / "binaries" / binary.key[:2] / f"{binary.key}.so"


def digest_path(output: Path) -> Path:
    """Return where the SHA-256 of an output is kept, as hexadecimal digits. It is written before the output."""
    return output.with_name(f"{output.name}.sha256")


def put(file: Path, output: Path) -> None:
    """Move a whole file into the cache."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(digest_path(output), hashlib.sha256(file.read_bytes()).hexdigest())
    file.replace(output)


def _has(output: Path) -> bool:
    """Return whether the cache has an output. Removes a damaged one, which a crash or a bad disk can leave."""
    try:
        content = output.read_bytes()
    except FileNotFoundError:
        return False
    try:
        whole = digest_path(output).read_text().split()[:1] == [hashlib.sha256(content).hexdigest()]
    except FileNotFoundError:
        whole = False
    if not whole:
        output.unlink(missing_ok=True)
    return whole


def _copied(shared: Path, output: Path) -> bool:
    """Copy an output of the shared cache, and return whether that has it with the right digest."""
    if not shared.is_file() or not digest_path(shared).is_file():
        return False
    try:
        content, expected = shared.read_bytes(), digest_path(shared).read_text().split()[:1]
    except (OSError, UnicodeDecodeError):
        return False
    if expected != [hashlib.sha256(content).hexdigest()]:
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(digest_path(output), expected[0])
    write_atomically(output, content)
    return True


def missing(graph: Graph, cache: Path, shared: Path | None = None) -> tuple[list[CompileStep], list[Binary]]:
    """Return the steps to run: the binaries that the cache lacks, and their objects that it lacks.

    Args:
        shared: A second cache, which is only read. Its outputs are copied into the cache.
    """

    def has(output: Path) -> bool:
        return _has(output) or (shared is not None and _copied(shared / output.relative_to(cache), output))

    binaries = [binary for binary in graph.binaries if not has(binary_path(cache, binary))]
    needed = {step.key: step for binary in binaries for step in binary.objects}
    return [step for step in needed.values() if not has(object_path(cache, step))], binaries


def check_path(directory: Path) -> None:
    """Raise a StoreError if compilers cannot work in a directory because of its name."""
    # nvcc splits its options at commas and gives some to a shell, with no quoting that survives all of its steps.
    if re.search(r"[\s,;:'\"\\$`&|<>(){}\[\]*?#!~]", str(directory)):
        raise StoreError(
            "compilers cannot work in a directory whose path has white space, commas, colons or shell characters",
            where=str(directory),
            hint="set KERNEL_BUILDER_CACHE to a plain path; project directories may have any name",
        )


@contextmanager
def work_directory(cache: Path) -> Iterator[Path]:
    """Create a directory in which a build's steps run, and remove it at the end.

    A build holds a lock on its directory. The next build removes directories whose lock is free: their builds were
    killed. Compilers of such a build may still be running; they have relative paths, so they stay in their directory.
    """
    parent = cache / "work"
    (cache / "locks").mkdir(parents=True, exist_ok=True)
    with locked(cache / "locks" / "work.lock"):
        parent.mkdir(exist_ok=True)
        if not debugging():
            _remove_abandoned(parent)
        work = Path(tempfile.mkdtemp(dir=parent))
        descriptor = os.open(work, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        yield work
    finally:
        discard(work)
        os.close(descriptor)
        with suppress(OSError):  # it is not empty
            parent.rmdir()


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.iterdir():
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
        remove_tree(directory)


def prune(graph: Graph, cache: Path) -> None:
    """Remove outputs that no build has used for a month; the outputs of the graph count as used now."""
    used = [object_path(cache, step) for step in graph.compiles]
    used += [binary_path(cache, binary) for binary in graph.binaries]
    for path in (*used, *map(digest_path, used)):
        with suppress(FileNotFoundError):
            os.utime(path)
    oldest = time.time() - _KEEP_SECONDS
    for folder in ("objects", "binaries", "packages", "translations"):
        for path in (cache / folder).rglob("*"):
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)


def write_log(cache: Path, key: str, text: str) -> Path | None:
    """Write the command and the output of a failed step; return the file, or None if it cannot be written.

    Only the newest hundred logs are kept.
    """
    logs = cache / "logs"
    path = logs / f"{key}.log"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        for old in sorted(logs.iterdir(), key=lambda log: log.stat().st_mtime)[:-_KEPT_LOGS]:
            old.unlink(missing_ok=True)
    except OSError:
        return None
    return path
