"""Medians of samples, with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A median, and an interval that contains the true median with at least 95 % confidence."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Half the width of the interval, as a share of the median."""
        return (self.high - self.low) / self.median / 2


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median of the samples and its interval, in the unit of the samples.

    The interval is taken from order statistics, so it assumes no distribution. With fewer than six samples no interval
    reaches 95 %, and the whole range is returned.
    """
    ordered = sorted(samples)
    rank = _rank(len(ordered))
    return Estimate(statistics.median(ordered), ordered[rank], ordered[-1 - rank])


def _rank(number: int) -> int:
    """Return the largest rank whose order statistic exceeds the true median with a probability of at most 2.5 %."""
    below, rank = 0.0, 0
    for successes in range(number // 2):
        below += math.comb(number, successes) / 2**number
        if below > 0.025:
            break
        rank = successes
    return rank
