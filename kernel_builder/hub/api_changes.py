"""API changes within a version that the publisher has allowed, with a reason.

The commits of the builds record them, and every later card lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernel_builder.hub.package_api import breaks_callers

_REASON = "API change, allowed by its publisher: "
_LINE = "- "


@dataclass(frozen=True)
class AllowedApiChange:
    """Changes for callers, with the reason that allows them."""

    reason: str
    lines: tuple[str, ...]

    @property
    def description(self) -> str:
        """The description of the commit that makes the change."""
        return "\n".join([_REASON + self.reason, *(_LINE + line for line in self.lines)])


def allowed(changes: Sequence[str], reason: str | None) -> AllowedApiChange | None:
    """Return the allowed change; None if no change breaks callers, or there is no reason."""
    breaking = tuple(" ".join(line.split()) for line in changes if breaks_callers(line))
    return AllowedApiChange(" ".join(reason.split()), breaking) if breaking and reason else None


def read(messages: Iterable[str]) -> tuple[AllowedApiChange, ...]:
    """Return the changes in commit messages, in the order of the messages."""
    changes = []
    for message in messages:
        _, mark, rest = message.partition(_REASON)
        if mark:
            reason, *lines = rest.splitlines()
            changes.append(AllowedApiChange(reason, tuple(x[len(_LINE) :] for x in lines if x.startswith(_LINE))))
    return tuple(changes)
