"""Medians of measurements, and confidence intervals that are neither too narrow nor too wide."""

from __future__ import annotations

import random

import pytest

from kernel_builder.measure.results import estimate


def test_a_median_lies_within_its_interval() -> None:
    assert estimate([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert estimate([5.0]) == (5.0, 5.0, 5.0)


@pytest.mark.parametrize("number", [6, 15, 21, 40])
def test_intervals_contain_the_true_median_with_the_stated_confidence(number: int) -> None:
    chance = random.Random(0)
    trials = 2000
    held = 0
    for _ in range(trials):
        interval = estimate([chance.expovariate(1.0) for _ in range(number)])
        # The median of this distribution, which is far from symmetric.
        held += interval.low <= 0.693147 <= interval.high
    assert 0.94 < held / trials < (0.99 if number > 6 else 1), "no wider than needed"
