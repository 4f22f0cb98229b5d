"""Intervals for differences between two groups of tries: without a skill and with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest, ttest_ind

# pass@1 and speedup@1 decide whether a skill helps. Each interval has 97.5 %, so that both hold with 95 %.
CONFIDENCE = 0.975

Groups = Sequence[Sequence[float]]
"""For each task, the values of its tries."""


class Compared(NamedTuple):
    """A measure without and with the skill, and their difference (for shares) or ratio, with its interval."""

    without: float
    with_skill: float
    change: float
    low: float
    high: float


def compare_shares(without: Sequence[bool], with_skill: Sequence[bool]) -> Compared:
    """Compare two shares; the change is their difference.

    The exact binomial intervals of the two shares are joined as in Newcombe, "Interval estimation for the difference
    between independent proportions", Statistics in Medicine 17 (1998), method 10.
    """
    before, after = sum(without) / len(without), sum(with_skill) / len(with_skill)
    old, new = (binomtest(sum(group), len(group)).proportion_ci(CONFIDENCE) for group in (without, with_skill))
    change = after - before
    low = change - math.hypot(after - new.low, old.high - before)
    high = change + math.hypot(new.high - after, before - old.low)
    return Compared(before, after, change, max(low, -1.0), min(high, 1.0))


def compare_means(without: Groups, with_skill: Groups) -> Compared:
    """Compare geometric means of positive values; the change is their ratio.

    The interval is Welch's t interval of the logarithms, after each task's mean is subtracted. It is infinite where
    the values of a group do not vary, as with one try.
    """
    before, after = ([np.log(task) for task in groups] for groups in (without, with_skill))
    means = [np.mean(np.concatenate(task)) for task in zip(before, after, strict=True)]
    centered = [
        np.concatenate([task - mean for task, mean in zip(group, means, strict=True)]) for group in (before, after)
    ]
    old, new = (float(np.mean([np.mean(task) for task in group])) for group in (before, after))
    low, high = -math.inf, math.inf
    if min(map(len, centered)) > 1 and max(map(np.ptp, centered)) > 1e-12:
        low, high = ttest_ind(*reversed(centered), equal_var=False).confidence_interval(CONFIDENCE)
    return Compared(math.exp(old), math.exp(new), math.exp(new - old), math.exp(low), math.exp(high))
