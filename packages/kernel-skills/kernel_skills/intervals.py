"""Intervals for differences between two groups of tries: without a skill and with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest, t

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

    The interval is the t interval of a group's effect in an analysis of variance of the logarithms by task and group,
    without interaction: for one try of each task, the paired t interval. It is infinite if there is one value in each
    group, or if nothing but the tasks and the groups differs.
    """
    before, after = ([np.log(task) for task in groups] for groups in (without, with_skill))
    old, new = (np.array([np.mean(task) for task in group]) for group in (before, after))
    change = float(np.mean(new - old))
    values, middle = [*before, *after], (old + new) / 2
    fitted = [*(middle - change / 2), *(middle + change / 2)]
    residuals = np.concatenate([task - mean for task, mean in zip(values, fitted, strict=True)])
    degrees = len(residuals) - len(old) - 1
    low, high = -math.inf, math.inf
    if degrees and np.ptp(residuals) > 1e-12:
        variance = float(np.sum(residuals**2)) / degrees * sum(1 / len(task) for task in values)
        low, high = t.interval(CONFIDENCE, degrees, change, math.sqrt(variance) / len(old))
    return Compared(float(np.exp(np.mean(old))), float(np.exp(np.mean(new))), *map(math.exp, (change, low, high)))
