"""Intervals for differences between two groups of tries, for few tries of any distribution.

Shares (pass@k) have exact binomial intervals in each group, joined by Newcombe's method. Ratios (speed, tokens, time)
have permutation intervals. Where two groups do not differ, both say so as often as they promise, however few tries
there are; a bootstrap of five values does not.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

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
    tail = (1 - CONFIDENCE) / 2

    def more(p: float) -> float:  # the probability of so many successes or more; rises with p
        return sum(math.comb(number, i) * p**i * (1 - p) ** (number - i) for i in range(successes, number + 1))

    def fewer(p: float) -> float:
        return sum(math.comb(number, i) * p**i * (1 - p) ** (number - i) for i in range(successes + 1))

    low = _where(lambda p: more(p) >= tail) if successes else 0.0
    high = _where(lambda p: fewer(p) <= tail) if successes < number else 1.0
    return low, high


def _where(becomes_true: Callable[[float], bool]) -> float:
    """Return the point in [0, 1] from which on a condition is true."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if becomes_true(middle) else (middle, high)
    return high


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
    """Compare geometric means of the best value of each task; the change is their ratio, by a bootstrap of tries."""
    generator = random.Random(0)

    def mean_of_best(groups: Groups) -> float:
        return statistics.geometric_mean(max(group) for group in groups)

    def resampled(groups: Groups) -> Groups:
        return [generator.choices(group, k=len(group)) for group in groups]

    ratios = sorted(mean_of_best(resampled(with_skill)) / mean_of_best(resampled(without)) for _ in range(_RESAMPLES))
    rank = math.floor((1 - CONFIDENCE) / 2 * _RESAMPLES)
    before, after = mean_of_best(without), mean_of_best(with_skill)
    return Compared(before, after, after / before, ratios[rank], ratios[-1 - rank])
