"""The builder's cache of objects and binaries.

Outputs are named by content. An output takes its name when it is whole. Its digest is beside it, so that an output
which a crash or a bad disk damages later is built again.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from kernel_builder.steps.graph import Binary, CompileStep, Graph
from kernel_format.errors import StoreError
from kernel_format.files import write_atomically

# Outputs that no build has used for this long are removed; they can be built again.
KEEP_SECONDS = 30 * 24 * 3600
_NAME = re.compile(r"[0-9a-f]{64}(\.\w+)*")  # of the cache's files, beside which a user may have others


def output_path(cache: Path, step: CompileStep | Binary) -> Path:
    """Return where the object or the binary of a step is kept."""
    folder, suffix = ("objects", "o") if isinstance(step, CompileStep) else ("binaries", "so")
    return cache / folder / step.key[:2] / f"{step.key}.{suffix}"


def digest_path(output: Path) -> Path:
    """Return where the SHA-256 of an output is kept, as hexadecimal digits. It is written before the output."""
    return output.with_name(f"{output.name}.sha256")


def put(content: bytes, output: Path) -> None:
    """Write the content of an output."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(digest_path(output), hashlib.sha256(content).hexdigest())
    write_atomically(output, content)


def _read(output: Path) -> bytes | None:
    """Return an output; None if it is missing, or damaged by a crash or a bad disk."""
    if not output.is_file() or not digest_path(output).is_file():  # reading a pipe may never end
        return None
    try:
        content, expected = output.read_bytes(), digest_path(output).read_text().split()[:1]
    except (OSError, UnicodeDecodeError):
        return None
    return content if expected == [hashlib.sha256(content).hexdigest()] else None


def missing(graph: Graph, cache: Path, shared: Path | None = None) -> tuple[list[CompileStep], list[Binary]]:
    """Return the steps to run: the binaries that the cache lacks, and their objects that it lacks.

    Args:
        shared: A second cache, which is only read. Its portable outputs are copied into the cache.
    """

    def has(step: CompileStep | Binary) -> bool:
        output = output_path(cache, step)
        if _read(output) is not None:
            mark_used(output)
            mark_used(digest_path(output))
            return True
        portable = all(of.compiler.portable for of in (step.objects if isinstance(step, Binary) else (step,)))
        content = _read(output_path(shared, step)) if shared and portable else None
        if content is not None:
            put(content, output)
        return content is not None

    binaries = [binary for binary in graph.binaries if not has(binary)]
    needed = {step.key: step for binary in binaries for step in binary.objects}
    return [step for step in needed.values() if not has(step)], binaries


def check_path(directory: Path) -> None:
    """Raise a StoreError if compilers cannot work in a directory because of its name."""
    # nvcc splits its options at commas and gives some to a shell, with no quoting that survives all of its steps.
    if re.search(r"[\s,;:'\"\\$`&|<>(){}\[\]*?#!~]", str(directory)):
        raise StoreError(
            "compilers cannot work in a directory whose path has white space, commas, colons or shell characters",
            where=str(directory),
            hint="set KERNEL_BUILDER_CACHE to a plain path; project directories may have any name",
        )


def mark_used(path: Path) -> None:
    """Let a file of the cache stay for another month, if the cache can be written."""
    with suppress(OSError):
        os.utime(path)


def prune(cache: Path) -> None:
    """Remove outputs, records and logs that no build has used for a month."""
    oldest = time.time() - KEEP_SECONDS
    for folder in ("objects", "binaries", "packages", "translations", "logs"):
        for path in (cache / folder).rglob("*"):
            with suppress(FileNotFoundError):  # another build may prune, too
                if _NAME.fullmatch(path.name) and path.is_file() and path.stat().st_mtime < oldest:
                    path.unlink()
