"""The builder's cache of objects and binaries, and the directory in which a build works.

Outputs are named by content. An output takes its name by a rename, when it is whole. Its digest is beside it, so that
an output which a crash or a bad disk damages later is built again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from kernel_builder.steps.graph import Binary, CompileStep, Graph
from kernel_format.errors import StoreError
from kernel_format.files import debugging, discard, locked, remove_tree, write_atomically

# Outputs that no build has used for this long are removed; they can be built again.
_KEEP_SECONDS = 30 * 24 * 3600
_KEPT_LOGS = 100
_POLL_SECONDS = 0.1

# In the directory of a step that has failed.
FAILED = "failed"


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
    for path in (output, digest_path(output)):
        if path.is_dir():
            shutil.rmtree(path)
        elif os.path.lexists(path) and not path.is_file():  # reading a pipe may never end
            path.unlink()
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

    Builds that run at the same time have directories of their own, `work/0`, `work/1` and so on. A build takes the
    first free one and holds its lock. A directory whose lock is free belongs to a killed build. Compilers of that build
    may still be running. They use relative paths, so they stay in their own directory when it is renamed, and their
    last command finds that its directory has another name. See `step_scripts`.
    """
    with ExitStack() as stack:
        with _listing(cache):
            for number in itertools.count():
                work = cache / "work" / str(number)
                if debugging() and work.exists():
                    continue
                with suppress(_InUseError):
                    stack.enter_context(_slot(cache, number))
                    break
            for other in _directories(cache):
                if not debugging() and (other == work or not _is_running(cache, other)):
                    other.rename(cache / f"removed-{uuid.uuid4().hex}")
            work.mkdir(parents=True)
        for removed in cache.glob("removed-*"):
            remove_tree(removed)
        try:
            yield work
        finally:
            discard(work)
            with suppress(OSError):  # it is not empty
                work.parent.rmdir()


def claim(cache: Path, work: Path, steps: Sequence[CompileStep]) -> tuple[list[CompileStep], list[CompileStep]]:
    """Return the steps that this build has to run, and the steps that other builds are running.

    A build claims a step by creating its directory in `work`.
    """
    mine, others = [], []
    with _listing(cache):
        running = [other for other in _directories(cache) if other != work and _is_running(cache, other)]
        for step in steps:
            if object_path(cache, step).exists():  # by another build, since `missing`
                continue
            if any(_is_claimed(other / step.key) for other in running):
                others.append(step)
            else:
                (work / step.key).mkdir()
                mine.append(step)
    return mine, others


def wait_for_others(cache: Path, steps: Sequence[CompileStep], work: Path) -> None:
    """Return when the object of one of the steps exists, or no other build works on that step."""
    while True:
        running = [other for other in _directories(cache) if other != work and _is_running(cache, other)]
        for step in steps:
            if object_path(cache, step).exists() or not any(_is_claimed(other / step.key) for other in running):
                return
        time.sleep(_POLL_SECONDS)


def _is_claimed(directory: Path) -> bool:
    return directory.exists() and not (directory / FAILED).exists()


class _InUseError(Exception):
    """Another build has the directory."""


def _listing(cache: Path) -> AbstractContextManager[None]:
    """Hold the lock under which directories of builds and claims are read and created."""
    (cache / "locks").mkdir(parents=True, exist_ok=True)
    return locked(cache / "locks" / "work.lock")


def _slot(cache: Path, number: int) -> AbstractContextManager[None]:
    def in_use() -> None:
        raise _InUseError

    return locked(cache / "locks" / f"work-{number}.lock", waiting=in_use)


def _directories(cache: Path) -> list[Path]:
    return [path for path in (cache / "work").glob("*") if path.name.isdigit()]


def _is_running(cache: Path, work: Path) -> bool:
    try:
        with _slot(cache, int(work.name)):
            return False
    except _InUseError:
        return True


def prune(graph: Graph, cache: Path) -> None:
    """Remove outputs that no build has used for a month; the outputs of the graph count as used now."""
    used = [object_path(cache, step) for step in graph.compiles] + [
        binary_path(cache, binary) for binary in graph.binaries
    ]
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
