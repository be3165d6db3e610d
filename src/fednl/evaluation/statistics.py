"""Intervals and paired comparisons, so that no number stands without its uncertainty. Imports no torch.

Every interval is over test questions: the clients and the training run are taken as they are, so none of them
says how much another training seed would change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fednl.evaluation.widening import widened
from fednl.seeding import seed_of

LEVEL = 0.95
Verdict = Literal["better", "worse", "no clear difference"]
UNDECIDED: Verdict = "no clear difference"
_BLOCK = 1_000_000  # numbers drawn at once: bounds the memory, not the result's quality


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval.

    Args:
        value: the mean.
        low: lower end of the interval.
        high: upper end of the interval.
        n: how many outcomes stand behind it.
    """

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Difference:
    """A mean paired difference, first minus second, with its confidence interval.

    Args:
        mean: the mean difference.
        low: lower end of the interval.
        high: upper end of the interval.
        n: how many pairs stand behind it.
    """

    mean: float
    low: float
    high: float
    n: int

    def verdict(self, higher_is_better: bool = True) -> Verdict:
        """Says "better" or "worse" of the first only where the interval excludes zero.

        Args:
            higher_is_better: False for a loss.
        """
        if self.low <= 0.0 <= self.high:
            return UNDECIDED
        return "better" if (self.low > 0.0) == higher_is_better else "worse"


def wilson(correct: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Gives the score interval of a proportion; honest at 0 and at n, where the usual one has no width.

    Args:
        correct: successes, 0 to n.
        n: trials, at least 1.
        level: confidence, between 0 and 1.

    Returns:
        The lower and the upper end, inside [0, 1].

    Raises:
        ValueError: n is 0, or `correct` is not within 0 to n.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209-212; no continuity correction.
    """
    if n < 1 or not 0 <= correct <= n:
        raise ValueError(f"a proportion needs 0 <= correct <= n and n >= 1, not {correct} of {n}")
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
    pairs = list(zip(map(bool, a), map(bool, b), strict=True))
    first = sum(x and not y for x, y in pairs)
    second = sum(y and not x for x, y in pairs)
    discordant = first + second
    # Integers until the last division: exact however many questions there are.
    tail = term = 1
    for k in range(min(first, second)):
        term = term * (discordant - k) // (k + 1)
        tail += term
    return min(1.0, tail / (1 << max(discordant - 1, 0)))


def bootstrap_mean(
    values: Sequence[float],
    seed: int,
    level: float = LEVEL,
    resamples: int = 10_000,
    bounds: tuple[float, float] | None = None,
) -> Interval:
    """Gives a mean with its bootstrap interval; `macro_mean` of one client.

    Args: as `macro_mean`, with one sequence.
    """
    return macro_mean({"": values}, seed, level, resamples, bounds)


def macro_mean(
    values: Mapping[str, Sequence[float]],
    seed: int,
    level: float = LEVEL,
    resamples: int = 10_000,
    bounds: tuple[float, float] | None = None,
) -> Interval:
    """Averages over clients, each client counting once, with a stratified percentile bootstrap interval.

    Each client's outcomes are resampled within the client. Where no resample differs (each client's outcomes
    are all alike) and `bounds` are given, the interval is widened to the means that would still produce such
    outcomes with probability at least (1 - level) / 2, spread over the clients so that the mean moves farthest: thirty
    right of thirty is not a certainty.

    Args:
        values: client -> its outcomes, finite numbers; a client without outcomes is left out of the average.
        seed: names the random stream; the same seed gives the same interval, whatever the clients' order.
        level: confidence, between 0 and 1.
        resamples: number of bootstrap resamples.
        bounds: the least and the largest value an outcome can have, where it has such.

    Raises:
        ValueError: no client has an outcome, or an outcome is not finite.

    Source: stratified percentile bootstrap, Efron and Tibshirani, An Introduction to the Bootstrap (1993),
        ch. 13; the widening is ours (for one client, Clopper and Pearson 1934 at its end point).
    """
    strata = _strata(values)
    value = math.fsum(float(stratum.mean()) for stratum in strata.values()) / len(strata)
    means = macro_resamples(values, seed, resamples)
    low, high = (float(end) for end in np.quantile(means, [(1 - level) / 2, (1 + level) / 2]))
    if bounds is not None and all(stratum.min() == stratum.max() for stratum in strata.values()):
        low, high = widened(strata, value, bounds, level)
    return Interval(value, low, high, sum(map(len, strata.values())))


def macro_resamples(values: Mapping[str, Sequence[float]], seed: int, resamples: int = 10_000) -> NDArray[np.float64]:
    """Draws the macro average again and again, each client's outcomes resampled within the client.

    Two arms on the same questions are drawn alike: the same seed picks the same questions, so that what is computed of
    both, draw by draw, is paired.

    Args: as `macro_mean`.

    Returns:
        The averages, `[resamples]`.

    Raises:
        ValueError: as `macro_mean`.
    """
    strata = _strata(values)
    means = np.zeros(resamples)
    for name, stratum in strata.items():
        means += _resampled_means(stratum, resamples, seed_of(seed, "bootstrap", name))
    return means / len(strata)


def has_spread(values: Mapping[str, Sequence[float]]) -> bool:
    """Says whether losses have an interval: every client has two outcomes or more.

    A single loss does not vary from resample to resample, so that it would count as certain.

    Args:
        values: client -> its outcomes; a client without outcomes does not count.
    """
    return min((len(found) for found in values.values() if len(found)), default=0) > 1


def paired_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    seed: int,
    level: float = LEVEL,
    resamples: int = 10_000,
    bounds: tuple[float, float] | None = None,
) -> Difference:
    """Compares two arms on the same questions of one client; `macro_difference` of one client.

    Args: as `macro_difference`, with one sequence each.
    """
    return macro_difference({"": a}, {"": b}, seed, level, resamples, bounds)


def macro_difference(
    a: Mapping[str, Sequence[float]],
    b: Mapping[str, Sequence[float]],
    seed: int,
    level: float = LEVEL,
    resamples: int = 10_000,
    bounds: tuple[float, float] | None = None,
) -> Difference:
    """Compares two arms on the same questions, averaged over clients, question by question.

    Args:
        a: client -> outcomes of the first arm.
        b: client -> outcomes of the second arm on the same questions, in the same order.
        seed: names the random stream.
        level: confidence, between 0 and 1.
        resamples: number of bootstrap resamples.
        bounds: the least and the largest difference possible; (-1, 1) for right or wrong. See `macro_mean`.

    Returns:
        The mean of a - b with its interval.

    Raises:
        ValueError: the arms have different clients or different numbers of outcomes, or there are none.

    Source: stratified percentile bootstrap of the paired differences, as in `macro_mean`.
    """
    if set(a) != set(b):
        raise ValueError("a paired comparison needs the same clients in both arms")
    gaps = {name: [float(x) - float(y) for x, y in zip(a[name], b[name], strict=True)] for name in a}
    mean = macro_mean(gaps, seed, level, resamples, bounds)
    return Difference(mean.value, mean.low, mean.high, mean.n)


def _strata(values: Mapping[str, Sequence[float]]) -> dict[str, NDArray[np.float64]]:
    strata = {name: _finite_array(values[name]) for name in sorted(values) if len(values[name])}
    if not strata:
        raise ValueError("a macro average needs at least one outcome")
    return strata


def _finite_array(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError("an outcome is not a finite number")
    return array


def _resampled_means(stratum: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Draws with replacement `resamples` times and averages each draw."""
    rng = np.random.default_rng(seed)
    step = max(1, _BLOCK // len(stratum))
    blocks = []
    for start in range(0, resamples, step):
        picks = rng.integers(len(stratum), size=(min(step, resamples - start), len(stratum)))
        blocks.append(stratum[picks].mean(axis=1))
    return np.concatenate(blocks)
