"""The log of a search: one JSON object a line, appended and never changed.

A line is on the disk before the search goes on, so whatever kills the search loses at most the line that was being
written. That line has no end, and the next search removes it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_format.errors import ConfigError, StoreError

LOG = "log.jsonl"
STARTED, FINISHED = "started", "finished"
AGENT_ENDED, TRY_ENDED = "agent-ended", "try-ended"
VERIFIED = "verified"
_REMEDY = "free some space, and start the same search again: it goes on after the last event"

REFERENCE_PEER = "eager"  # whose speed candidates are compared with

Event = Mapping[str, Any]


def read_events(path: Path) -> list[Event]:
    """Return the events of a log, without a last line that has no end."""
    if not path.exists():
        raise ConfigError(f"there is no {LOG}", where=str(path.parent), hint="name the directory of a search")
    events: list[Event] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            event = json.loads(line)
            events.append({"event": event["event"], **event})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                "is not an event of a search", where=f"{path}: line {number}", hint="remove the line"
            ) from error
    return events


class RunLog:
    """An open log; its file need not exist. Several threads may append; the caller keeps other processes away."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        content = path.read_bytes()
        os.ftruncate(self._file, content.rfind(b"\n") + 1)
        self.events = read_events(path)

    def append(self, event: str, **values: Any) -> Event:
        """Append an event with the time, and return it when it is on the disk."""
        entry = {"event": event, "time": round(time.time(), 3), **values}
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            size = os.fstat(self._file).st_size
            try:
                with open(self._file, "ab", closefd=False) as file:  # `os.write` may write a part
                    file.write(line)
                os.fsync(self._file)
            except OSError as error:
                os.ftruncate(self._file, size)
                raise StoreError(f"cannot be written: {error.strerror}", where=str(self.path), hint=_REMEDY) from error
            self.events.append(entry)
        return entry

    def find(self, event: str, **values: Any) -> Event | None:
        """Return the last event of a kind that has these values, or None."""
        with self._lock:
            wanted = {"event": event, **values}.items()
            return next((entry for entry in reversed(self.events) if entry.items() >= wanted), None)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
