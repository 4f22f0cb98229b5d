"""Intervals for differences between two groups of tries, for few tries of any distribution.

Shares (pass@k) have exact binomial intervals in each group, joined by Newcombe's method. Ratios (speed, tokens, time)
have permutation intervals. Where two groups do not differ, both say so as often as they promise, however few tries
there are.

Libraries have no such intervals. For 10 tries a group, "newcomb" and "agresti-caffo" of statsmodels'
`confint_proportions_2indep` exclude equal shares in up to 4.1 % of cases, where they promise 2.5 %, and "score" has no
answer for shares of 0. SciPy's permutation test has neither an interval nor tasks. A bootstrap of five values is too
narrow: it is used only where nothing is decided by it.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy.stats import binomtest, bootstrap

# pass@1 and speedup@1 decide whether a skill helps. Each interval has 97.5 %, so that both hold with 95 %.
CONFIDENCE = 0.975
_PERMUTATIONS = 2000
_RESAMPLES = 2000

# For each task, the values of its tries.
Groups = Sequence[Sequence[float]]


class Compared(NamedTuple):
    """A measure without and with the skill, and their difference (for shares) or ratio, with its interval."""

    without: float
    with_skill: float
    change: float
    low: float
    high: float


def share_interval(successes: int, number: int) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) interval for a share of `number` tries."""
    interval = binomtest(successes, number).proportion_ci(CONFIDENCE)
    return interval.low, interval.high


def compare_shares(without: Sequence[bool], with_skill: Sequence[bool]) -> Compared:
    """Compare two shares; the change is their difference."""
    before, after = sum(without) / len(without), sum(with_skill) / len(with_skill)
    (before_low, before_high), (after_low, after_high) = (
        share_interval(sum(group), len(group)) for group in (without, with_skill)
    )
    change = after - before
    low = change - math.hypot(after - after_low, before_high - before)
    high = change + math.hypot(after_high - after, before - before_low)
    return Compared(before, after, change, max(low, -1.0), min(high, 1.0))


def compare_means(without: Groups, with_skill: Groups) -> Compared:
    """Compare geometric means of positive values; the change is their ratio.

    The interval has the ratios for which the tries of both groups could be exchanged within their tasks: an exact test,
    inverted. It is infinite where so few tries cannot tell any ratio from another.
    """
    tasks = [
        ([*map(math.log, before)], [*map(math.log, after)]) for before, after in zip(without, with_skill, strict=True)
    ]
    difference = statistics.fmean(statistics.fmean(after) - statistics.fmean(before) for before, after in tasks)
    generator = random.Random(0)
    limits = [_shift(tasks, difference, generator) for _ in range(_PERMUTATIONS)]
    # The order as it was is one of the permutations. It excludes no shift, and counts on both sides.
    lows = sorted([-math.inf, *(-math.inf if limit is None else limit for limit in limits)])
    highs = sorted([math.inf, *(math.inf if limit is None else limit for limit in limits)])
    rank = math.floor((1 - CONFIDENCE) / 2 * len(lows))
    return Compared(
        math.exp(statistics.fmean(statistics.fmean(before) for before, _ in tasks)),
        math.exp(statistics.fmean(statistics.fmean(after) for _, after in tasks)),
        math.exp(difference),
        math.exp(lows[rank]),
        math.exp(highs[-1 - rank]),
    )


def _shift(
    tasks: Sequence[tuple[list[float], list[float]]], difference: float, generator: random.Random
) -> float | None:
    """Return the shift of the second groups at which one random exchange within tasks gives what was observed.

    None if the exchange changes nothing.
    """
    moved, kept = 0.0, 0.0  # the difference after the exchange; how much of a shift of the second groups is in it
    for before, after in tasks:
        both, first, second = before + after, len(before), len(after)
        chosen = generator.sample(range(first + second), second)
        total = sum(both[index] for index in chosen)
        own = sum(index >= first for index in chosen)
        moved += total / second - (sum(both) - total) / first
        kept += own / second - (second - own) / first
    moved, kept = moved / len(tasks), kept / len(tasks)
    return None if kept > 1 - 1e-12 else (difference - moved) / (1 - kept)


def compare_best(without: Groups, with_skill: Groups) -> Compared:
    """Compare geometric means of the best value of each task; the change is their ratio, by a bootstrap of tries.

    Each group has at least two tries of a task.
    """

    def mean_of_best(groups: Groups) -> float:
        return statistics.geometric_mean(max(group) for group in groups)

    def ratio(*groups: Sequence[float]) -> float:
        return mean_of_best(groups[len(without) :]) / mean_of_best(groups[: len(without)])

    groups = (*without, *with_skill)
    sampled = bootstrap(
        groups, ratio, confidence_level=CONFIDENCE, n_resamples=_RESAMPLES, method="percentile", vectorized=False, rng=0
    )
    return Compared(mean_of_best(without), mean_of_best(with_skill), ratio(*groups), *sampled.confidence_interval)
