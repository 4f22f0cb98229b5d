"""Unbiased estimates for the best of k attempts from a sample of attempts, which no library has."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """Return the probability that at least one of k attempts is right, estimated from more attempts than k.

    This is the share of all sets of k of the attempts that have a right one, 1 - C(n - c, k) / C(n, k), which is
    unbiased. `1 - (1 - c / n) ** k` is too small. Source: Chen et al., "Evaluating Large Language Models Trained on
    Code", arXiv:2107.03374, section 2.1.
    """
    return 1 - math.comb(attempts - right, k) / math.comb(attempts, k)


def speedup_at_k(speeds: Sequence[float], k: int) -> float:
    """Return the expected speed of the fastest of k attempts, estimated from the speeds of at least k attempts.

    This is the mean of the maximum over all sets of k of the attempts, which is unbiased. The attempt with the i-th
    smallest speed is the fastest of C(i - 1, k - 1) sets. Source: Nichols et al., "Can Large Language Models Write
    Parallel Code?", arXiv:2401.12554, where it is speedup_n@k. Unlike there, every attempt counts: one that is wrong
    has the speed 1, that of the reference which is used in its place.
    """
    chosen = (math.comb(index, k - 1) * speed for index, speed in enumerate(sorted(speeds)))
    return math.fsum(chosen) / math.comb(len(speeds), k)
