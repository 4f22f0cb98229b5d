"""The results of builds as a Markdown table.

Code of the pull request writes the results, and the table is published with the rights of the repository. So every text
is cut and shown as code, which cannot contain links, mentions, HTML or table cells.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_builder.plural import counted

_MAX_FILES = 1000
_MAX_FILE_BYTES = 4 * 2**20
_MAX_ROWS_OF_FILE = 1000
_MAX_PACKAGE_BYTES = 2**50
_MAX_TEXT = 200
_MAX_OUTPUT_LINES = 20
# GitHub accepts comments of 65,536 characters.
_MAX_MARKDOWN = 60_000


@dataclass(frozen=True)
class BuildRow:
    """One variant of a build: its size in bytes if it was built, or else the reason."""

    project: str
    variant: str
    status: str
    size: int | None = None
    shares: tuple[str, ...] = ()
    reason: str = ""

    @property
    def built(self) -> bool:
        return self.size is not None


@dataclass(frozen=True)
class JobFailure:
    """The reason why a job or a part of it failed, and the first lines of the compiler's output, if any."""

    reason: str
    output: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildResults:
    """The variants of several jobs, and the failures by job."""

    rows: tuple[BuildRow, ...] = ()
    failures: Mapping[str, JobFailure] = field(default_factory=dict)


def read_results(directory: Path) -> BuildResults:
    """Read every `.json` file below a directory as the output of `kernel-builder build --json`.

    A file with other content counts as a failed job.
    """
    rows: dict[tuple[str, str], BuildRow] = {}
    failures: dict[str, JobFailure] = {}
    for file in sorted(directory.rglob("*.json"))[:_MAX_FILES]:
        try:
            described = _read_object(file)
            job_rows = _rows(described)
            if "packages" not in described or "error" in described:
                failures[file.stem] = _failure(described)
        except (OSError, ValueError, RecursionError):
            failures[file.stem] = JobFailure("no result: the job ended early")
            continue
        for row in job_rows:
            # Another runner may build a variant that this one cannot build.
            if row.built or (row.project, row.variant) not in rows:
                rows[row.project, row.variant] = row
    return BuildResults(tuple(rows[key] for key in sorted(rows)), failures)


def markdown(results: BuildResults) -> str:
    """Return a table of variants with status, size and shared binaries, and the reasons of failures."""
    rows = [row for row in results.rows if row.built]
    others = [row for row in results.rows if not row.built]
    if not (rows or others or results.failures):
        return "No packages were built.\n"
    total = sum(row.size or 0 for row in rows)
    head = f"{counted(len(rows), 'variant')} built, {_mebibytes(total)}"
    head += f"; {len(others)} not built" if others else ""
    head += f"; {counted(len(results.failures), 'job')} failed" if results.failures else ""
    lines = [f"**{head}**", ""]
    for job, failure in results.failures.items():
        lines.append(f"- {_code(job)} failed: {_code(failure.reason)}")
        if failure.output:
            # Replaced tildes: no line can end the block.
            lines += ["", "  ~~~", *(f"  {_printable(line).replace('~', '-')}" for line in failure.output), "  ~~~", ""]
    lines += [f"- {_code(row.project)} {_code(row.variant)} {_code(row.status)}: {_code(row.reason)}" for row in others]
    if rows:
        lines += ["", "| project | variant | status | size | binary shared with |", "| --- | --- | --- | ---: | --- |"]
        lines += [_table_row(row) for row in rows]
    return _cut(lines)


def _table_row(row: BuildRow) -> str:
    shares = f"{len(row.shares)} more" if len(row.shares) > 1 else "".join(map(_code, row.shares))
    cells = (_code(row.project), _code(row.variant), _code(row.status), _mebibytes(row.size or 0), shares)
    return f"| {' | '.join(cells)} |"


def _cut(lines: Sequence[str]) -> str:
    length = 0
    for number, line in enumerate(lines):
        length += len(line) + 1
        if length > _MAX_MARKDOWN:
            return "\n".join(lines[:number]) + f"\n\n{len(lines) - number} more lines: see the run's summary.\n"
    return "\n".join(lines) + "\n"


def _read_object(file: Path) -> Mapping[str, Any]:
    if file.is_symlink() or file.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(file)
    described = json.loads(file.read_bytes())
    if not isinstance(described, dict):
        raise ValueError(file)  # noqa: TRY004
    return described


def _failure(described: Mapping[str, Any]) -> JobFailure:
    # Variants with the same error list it repeatedly.
    of_variants = (
        error for failure in _objects(described.get("failures")) for error in _objects(failure.get("errors"))
    )
    outputs = [error.get("output") for error in (described, *of_variants)]
    distinct = dict.fromkeys(output for output in outputs if isinstance(output, str))
    lines = [line for output in distinct for line in output.splitlines()]
    reason = ": ".join(filter(None, (_text(described.get(key)) for key in ("where", "message"))))
    return JobFailure(reason, tuple(line[:_MAX_TEXT] for line in lines[:_MAX_OUTPUT_LINES]))


def _rows(described: Mapping[str, Any]) -> list[BuildRow]:
    rows = [
        BuildRow(
            project=_text(package.get("project")),
            variant=_text(package.get("variant")),
            status=_text(package.get("status")),
            size=_size(package.get("bytes")),
            shares=tuple(_text(name) for name in _list(package.get("shares-binary-with"))),
        )
        for package in _objects(described.get("packages"))
    ]
    rows += [
        BuildRow(
            _text(variant.get("project")),
            _text(variant.get("variant")),
            "not built",
            reason=_text(variant.get("reason")),
        )
        for variant in _objects(described.get("unavailable"))
    ]
    rows += [
        BuildRow(
            _text(failure.get("project")),
            _text(failure.get("variant")),
            "failed",
            reason="; ".join(_text(error.get("message")) for error in _objects(failure.get("errors"))),
        )
        for failure in _objects(described.get("failures"))
    ]
    return rows


def _list(value: object) -> list[Any]:
    return value[:_MAX_ROWS_OF_FILE] if isinstance(value, list) else []


def _objects(value: object) -> Iterable[Mapping[str, Any]]:
    return (item for item in _list(value) if isinstance(item, dict))


def _size(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _MAX_PACKAGE_BYTES else None


def _text(value: object) -> str:
    return " ".join(str(value).split())[:_MAX_TEXT] if isinstance(value, str) else ""


def _code(text: str) -> str:
    """Return text as a code span, without characters that end the span or a table cell."""
    shown = _printable(text[:_MAX_TEXT]).replace("`", "'").replace("|", "/").replace("\\", "/").strip()
    return f"`{shown}`" if shown else ""


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text.expandtabs())


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
