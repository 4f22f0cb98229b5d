"""Reading one repository for the index of all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyromark

from kernel_format import front_matter
from kernel_hub.git.repository import GitRepository
from kernel_hub.refusals import Refusal
from kernel_hub.repositories.index import IndexedRepository
from kernel_hub.storage.disk import occupied
from kernel_hub.storage.large_files import LargeFiles

CARD_BYTES = 32 << 10  # a page shows no larger card: tables can take a millisecond per KiB
SUMMARY_CHARACTERS = 4000
LISTED_VERSIONS = 10  # the newest


def read_repository(
    repository: GitRepository, large_files: LargeFiles, known: IndexedRepository | None
) -> IndexedRepository:
    """Return the index entry of a repository.

    `known` is the old entry: its size is kept, and its summary if the card is the same. None: measure the size.
    """
    main = repository.refs.resolve("main")
    versions = version_branches(repository)
    newest = repository.refs.resolve(versions[-1]) if versions else main
    modified = repository.revisions.last_modified(main)
    card, source, _ = find_card(repository, main, newest)
    return IndexedRepository(
        repo_id=repository.repo_id,
        organization=repository.repo_id.partition("/")[0],
        private=repository.private,
        commit=main,
        modified=modified,
        changed=max(modified, repository.revisions.last_modified(newest)),
        versions=" ".join(versions[-LISTED_VERSIONS:]),
        card=card,
        summary=known.summary if known is not None and known.card == card else _summary(source),
        bytes=stored_bytes(repository.path, large_files) if known is None else known.bytes,
    )


def stored_bytes(repository: Path, large_files: LargeFiles) -> int:
    """Return the bytes that a quota counts for the repository at a path, which may be damaged."""
    large = [large_files.size(marker.name) or 0 for marker in (repository / "large").glob("?" * 64)]
    return sum(map(occupied, [*large, *file_sizes(repository)]))


def file_sizes(path: Path) -> Iterator[int]:
    """Yield the sizes of all files, of which `git gc` may remove some meanwhile."""
    for directory, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                yield Path(directory, name).stat().st_size


def version_branches(repository: GitRepository) -> tuple[str, ...]:
    """Return the branches `v1`, `v2` and so on, in order."""
    branches = (full.removeprefix("refs/heads/") for full in repository.refs.names())
    return tuple(sorted((name for name in branches if re.fullmatch(r"v\d{1,9}", name)), key=lambda name: int(name[1:])))


def find_card(repository: GitRepository, *commits: str) -> tuple[str, str, str]:
    """Return the blob, the Markdown and the commit of the first card in one of several commits, or "" for each."""
    for commit in commits:
        entry = None
        with suppress(Refusal):  # too large a folder, as git itself may have written it, has no card
            entry = repository.revisions.find(commit, "README.md")
        if entry is None or entry.is_folder:
            continue
        if entry.large or entry.size > CARD_BYTES:
            size = f"{entry.content_size / 1024:.0f} KiB"
            return entry.oid, f"The [card](README.md) has {size} and is too large to show here.", commit
        text = front_matter.split(repository.revisions.read(entry).decode("utf-8", "replace"))[1]
        if text:
            return entry.oid, text, commit
    return "", "", ""


def _summary(card: str) -> str:
    """Return the first paragraph of a card, as plain text."""
    parts: list[str] = []
    inside = False
    for event in pyromark.events(card[:SUMMARY_CHARACTERS]):
        if event == {"Start": "Paragraph"}:
            inside = True
        elif inside and event == {"End": "Paragraph"}:
            break
        elif inside and isinstance(event, dict):
            parts += [str(text) for kind, text in event.items() if kind in {"Text", "Code"}]
        elif inside:  # the end of a line
            parts.append(" ")
    return "".join(parts)
