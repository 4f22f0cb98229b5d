"""A `major.minor` version: of Torch, of a back end, of Python."""

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
        """The release as variant names write it: `2.10` is `210`."""
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

    @staticmethod
    def from_digits(digits: str) -> Release:
        """Read the one-digit major and the minor of a Torch name (`210`)."""
        return Release(int(digits[0]), int(digits[1:]))


def is_within(release: Release, low: Release | None, high: Release | None) -> bool:
    """Return whether a release is in a range with both ends; None is no limit."""
    return (low is None or low <= release) and (high is None or release <= high)
