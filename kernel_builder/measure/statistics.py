"""What samples say: a median, and the interval that it lies in."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A median, and an interval that holds the true one with a confidence of at least 95 percent."""

    median: float
    low: float
    high: float


def estimate(samples: Sequence[float]) -> Estimate:
    """The median, and an interval from the samples' order, which assumes nothing about how they are distributed.

    With fewer than six samples no interval has that confidence, and it is the samples' whole range.
    """
    ordered = sorted(samples)
    rank = _rank(len(ordered))
    return Estimate(statistics.median(ordered), ordered[rank], ordered[-1 - rank])


def _rank(number: int) -> int:
    """The largest rank whose order statistic is above the median with a chance of at most 2.5 percent."""
    below, rank = 0.0, 0
    for successes in range(number // 2):
        below += math.comb(number, successes) / 2**number
        if below > 0.025:
            break
        rank = successes
    return rank
