"""Versions: a `major.minor` release of Torch, a back end or Python; and limits with any number of parts."""

from __future__ import annotations

import re
from typing import NamedTuple


class Release(NamedTuple):
    """A `major.minor` version, ordered as numbers."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @property
    def digits(self) -> str:
        """The release's spelling in variant names: `2.10` is `210`."""
        return f"{self.major}{self.minor}"

    @staticmethod
    def parse(text: str) -> Release:
        """Read `2.10` or `2.10.0`.

        Raises:
            ValueError: If `text` is not dotted digits with at least a major and a minor part.
        """
        match = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)*", text)
        if not match:
            raise ValueError(f"{text!r} is not a version like 2.10")
        return Release(int(match[1]), int(match[2]))


class Version(tuple[int, ...]):
    """A version of at least two parts, the end of a range of releases.

    It is compared as the public builder does: part by part, and zeros at the end do not count. 12.8 is less than
    12.8.1, and 13 is 13.0.
    """

    def __str__(self) -> str:
        return ".".join(map(str, self))

    @staticmethod
    def parse(text: str) -> Version:
        """Read dotted digits, such as `13`, `2.10` or `12.8.1`."""
        parts = [int(part) for part in text.split(".")]
        while len(parts) > 2 and not parts[-1]:
            parts.pop()
        return Version([*parts, 0] if len(parts) == 1 else parts)


def is_within(release: Release, low: Version | None, high: Version | None) -> bool:
    """Return whether a release is in a range with both ends; None is no limit."""
    return (low is None or low <= release) and (high is None or release <= high)
