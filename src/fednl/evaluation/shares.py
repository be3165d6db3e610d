"""Shares, such as of right answers: their intervals and paired comparisons, honest at 0 and at 1. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
_TABLE = 50_000  # sums of weights that are told apart: bounds the time of `macro_mcnemar`


def wilson(correct: float, n: float, level: float = LEVEL) -> tuple[float, float]:
    """Gives the score interval of a proportion; honest at 0 and at n, where the usual one has no width.

    Args:
        correct: successes, 0 to n; neither need be whole.
        n: trials, above 0.
        level: confidence, between 0 and 1.

    Returns:
        The lower and the upper end, inside [0, 1].

    Raises:
        ValueError: n is not above 0, or `correct` is not within 0 to n.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209-212; no continuity correction.
    """
    if n <= 0 or not 0 <= correct <= n:
        raise ValueError(f"a proportion needs 0 <= correct <= n and n > 0, not {correct} of {n}")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    rate = correct / n
    centre = rate + z * z / (2 * n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if correct == 0 else max(0.0, (centre - half) / scale)
    high = 1.0 if correct == n else min(1.0, (centre + half) / scale)
    return low, high


def mcnemar(a: Sequence[bool | int], b: Sequence[bool | int]) -> float:
    """Tests whether two arms that answered the same questions are equally often right; exact, two-sided.

    Args:
        a: right (1) or wrong (0) per question.
        b: the other arm's outcomes on the same questions, in the same order.

    Returns:
        The p-value; 1.0 where the arms never disagree.

    Raises:
        ValueError: the lengths differ.

    Source: Q. McNemar, Psychometrika 12 (1947) 153-157, in its exact binomial form.
    """
    return _coins(*_discordant(a, b))


def macro_mcnemar(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float:
    """Tests whether two averages over clients differ on the same questions: McNemar's test, weighed as the average is.

    A question that one arm alone answers right counts 1 / n_k for it, n_k the questions of its client, as it does in
    the difference of the averages. Where no client has a better arm, each such question is as likely to be the one's as
    the other's: p is how often such coins give a difference as large or larger, in either direction. It is exact, and
    speaks for the arm whose average is higher. Of one client, or of clients with as many questions each, it is
    `mcnemar` over all questions.

    Args:
        a: each client's outcomes, right (1) or wrong (0) per question; a client without questions does not count.
        b: the other arm's, on the same questions in the same order.

    Returns:
        The two-sided p-value; 1.0 where the arms never disagree.

    Raises:
        ValueError: the clients, or the questions of one, are not as many in both.

    Source: McNemar (1947), as above; coins for a weighted sum as in R. A. Fisher, The Design of Experiments (1935),
        section 21. Weights are whole numbers, rounded only where exact ones would make a table beyond `_TABLE`, which
        leaves the test exact, of a slightly different average.
    """
    counted: dict[int, list[int]] = {}
    for x, y in zip(a, b, strict=True):
        both = counted.setdefault(len(x), [0, 0])
        first, second = _discordant(x, y)
        both[0] += first
        both[1] += second
    counted.pop(0, None)
    if len(counted) < 2:
        return _coins(*next(iter(counted.values()), (0, 0)))
    whole = math.lcm(*counted)
    weights = {n: whole // n for n in counted}
    if (total := sum(weights[n] * sum(both) for n, both in counted.items())) > _TABLE:
        weights = {n: max(1, (weight * _TABLE + total // 2) // total) for n, weight in weights.items()}
    chances, gap = np.ones(1), 0
    for n, (first, second) in counted.items():
        discordant, weight = first + second, weights[n]
        gap += weight * (first - second)
        wider = np.zeros(len(chances) + discordant * weight)
        for wins in range(discordant + 1):
            chance = math.comb(discordant, wins) / (1 << discordant)
            wider[wins * weight : wins * weight + len(chances)] += chance * chances
        chances = wider
    gaps = np.abs(2 * np.arange(len(chances)) - (len(chances) - 1))
    return min(1.0, float(chances[gaps >= abs(gap)].sum()))


def _discordant(a: Sequence[float], b: Sequence[float]) -> tuple[int, int]:
    """How many questions only the first arm has right, and how many only the second."""
    pairs = list(zip(map(bool, a), map(bool, b), strict=True))
    return sum(x and not y for x, y in pairs), sum(y and not x for x, y in pairs)


def _coins(first: int, second: int) -> float:
    """The chance that as many fair coins fall at least as unevenly."""
    discordant = first + second
    # Integers until the last division: exact however many questions there are.
    tail = term = 1
    for k in range(min(first, second)):
        term = term * (discordant - k) // (k + 1)
        tail += term
    return min(1.0, tail / (1 << max(discordant - 1, 0)))


def macro_score(strata: Sequence[NDArray[np.float64]], level: float) -> tuple[float, float]:
    """Gives the score interval of an average of shares, each counting once; of one share it is Wilson's.

    The average stands for as many trials as would vary as much: n = m (1 - m) / sum_k s_k (1 - s_k) / (K^2 n_k), with
    m the mean of s_k = (right_k + 1) / (n_k + 2), in which a client that is always right is no certainty.

    Args:
        strata: each client's outcomes: right (1) or wrong (0), or parts of 1, whose interval is wider than need be.
        level: confidence, between 0 and 1.

    Raises:
        ValueError: an outcome is below 0 or above 1.

    Source: effective sample size as in Korn and Graubard, Survey Methodology 24 (1998) 193-201, with Wilson's interval;
        one right and one wrong more as in Agresti and Caffo, Am. Stat. 54 (2000) 280-288.
    """
    if any(outcomes.min() < 0 or outcomes.max() > 1 for outcomes in strata):
        raise ValueError("a share is within 0 and 1")
    share = math.fsum(float(outcomes.mean()) for outcomes in strata) / len(strata)
    if len(strata) == 1:
        return wilson(float(strata[0].sum()), len(strata[0]), level)
    sizes = [len(outcomes) for outcomes in strata]
    rates = [(float(outcomes.sum()) + 1) / (n + 2) for outcomes, n in zip(strata, sizes, strict=True)]
    mean = math.fsum(rates) / len(rates)
    spread = math.fsum(rate * (1 - rate) / n for rate, n in zip(rates, sizes, strict=True)) / len(rates) ** 2
    trials = mean * (1 - mean) / spread
    return wilson(min(1.0, share) * trials, trials, level)


def macro_gap(a: Sequence[NDArray[np.float64]], b: Sequence[NDArray[np.float64]], level: float) -> tuple[float, float]:
    """Gives how far below and above the difference of two averages of shares its interval ends, question by question.

    Args:
        a: each client's outcomes of the first arm, as in `macro_score`.
        b: the second arm's on the same questions, in the same order.
        level: confidence, between 0 and 1.

    Source: R. G. Newcombe, Stat. Med. 17 (1998) 2635-2650, method 10; with several clients ours, on `macro_score`.
    """
    (low_a, high_a), (low_b, high_b) = (macro_score(arm, level) for arm in (a, b))
    mean_a, mean_b = (math.fsum(float(x.mean()) for x in arm) / len(arm) for arm in (a, b))
    n = sum(map(len, a))
    pairs = [(x, y, len(x)) for x, y in zip(a, b, strict=True)]
    moves = [(float((x * y).mean() - x.mean() * y.mean()), size) for x, y, size in pairs]
    scale = math.sqrt(math.fsum(float(x.var()) / len(x) for x in a) * math.fsum(float(y.var()) / len(y) for y in b))
    together = math.fsum(move / size for move, size in moves)
    if together > 0:  # the correction for continuity, of the mean covariance
        mean_move = math.fsum(move * size for move, size in moves) / n
        together *= max(0.0, 1 - 1 / (2 * n * mean_move)) if mean_move > 0 else 0.0
    phi = together / scale if scale else 0.0

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one**2 - 2 * phi * one * other + other**2))

    return reach(mean_a - low_a, high_b - mean_b), reach(high_a - mean_a, mean_b - low_b)


def finite(values: Sequence[float]) -> NDArray[np.float64]:
    """Gives outcomes as an array; a ValueError where one is not a finite number."""
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError("an outcome is not a finite number")
    return array
