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

from fednl.evaluation.shares import LEVEL as LEVEL
from fednl.evaluation.shares import finite, macro_gap, macro_score
from fednl.seeding import seed_of

Verdict = Literal["better", "worse", "no clear difference"]
UNDECIDED: Verdict = "no clear difference"
LEAST_OUTCOMES = 3
"""Fewer losses than this of a client say nothing of how they vary: no interval, and no verdict."""
_BLOCK = 1_000_000  # numbers drawn at once: bounds the memory, not the result's quality
_ROUNDING = 1e-9  # ends that are closer than this share of their size differ by how a computer adds


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

    @property
    def has_width(self) -> bool:
        """Whether its ends differ; outcomes that never vary give an interval that would pass for certainty."""
        return _apart(self.low, self.high)


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

    @property
    def has_width(self) -> bool:
        """Whether its ends differ, as of `Interval`."""
        return _apart(self.low, self.high)

    def verdict(self, higher_is_better: bool = True) -> Verdict:
        """Says "better" or "worse" of the first only where the interval has a width and excludes zero.

        Args:
            higher_is_better: False for a loss.
        """
        if self.low <= 0.0 <= self.high or not self.has_width:
            return UNDECIDED
        return "better" if (self.low > 0.0) == higher_is_better else "worse"


def _apart(low: float, high: float) -> bool:
    return high - low > _ROUNDING * max(abs(low), abs(high))


def bootstrap_mean(
    values: Sequence[float], seed: int, level: float = LEVEL, resamples: int = 10_000, shares: bool = False
) -> Interval:
    """Gives a mean with its interval; `macro_mean` of one client.

    Args: as `macro_mean`, with one sequence.
    """
    return macro_mean({"": values}, seed, level, resamples, shares)


def macro_mean(
    values: Mapping[str, Sequence[float]],
    seed: int,
    level: float = LEVEL,
    resamples: int = 10_000,
    shares: bool = False,
) -> Interval:
    """Averages over clients, each client counting once, with an interval over their outcomes.

    Of shares (right or wrong, or parts of 1) it is a score interval, in which thirty right of thirty is no certainty.
    Of anything else it is a bootstrap within clients: each client's deviations are scaled by sqrt(n / (n - 1)), and
    their quantiles as Student's are to normal ones, without which few outcomes would give too narrow an interval.
    One or two outcomes of a client that are no shares make it too narrow: see `has_spread` and `told_ends`.

    Args:
        values: client -> its outcomes, finite numbers; a client without outcomes is left out of the average.
        seed: names the random stream; the same seed gives the same interval, whatever the clients' order.
        level: confidence, between 0 and 1.
        resamples: number of bootstrap resamples.
        shares: every outcome is within 0 and 1.

    Raises:
        ValueError: no client has an outcome, or an outcome is not finite, or not a share.

    Source: shares: `fednl.evaluation.shares.macro_score`. Others: stratified bootstrap, Efron and Tibshirani (1993),
        ch. 13, scaled as in Hesterberg, Am. Stat. 69 (2015) 371-386; degrees of freedom as in `stretch`.
    """
    strata = _strata(values)
    value = math.fsum(float(stratum.mean()) for stratum in strata.values()) / len(strata)
    n = sum(map(len, strata.values()))
    if shares:
        return Interval(value, *macro_score(list(strata.values()), level), n)
    ends = np.quantile(macro_resamples(values, seed, resamples), [(1 - level) / 2, (1 + level) / 2])
    low, high = (value + stretch(values, level) * (float(end) - value) for end in ends)
    return Interval(value, min(low, value), max(high, value), n)


def stretch(values: Mapping[str, Sequence[float]], level: float = LEVEL) -> float:
    """Gives Student's quantile over the normal one, for the degrees of freedom of a macro average's spread.

    Args:
        values: client -> its outcomes.
        level: confidence, between 0 and 1.

    Source: B. L. Welch, Biometrika 34 (1947) 28-35.
    """
    from scipy.stats import t

    strata = [stratum for stratum in _strata(values).values() if len(stratum) > 1]
    spreads = [(float(stratum.var(ddof=1)) / len(stratum), len(stratum) - 1) for stratum in strata]
    if not (total := math.fsum(spread for spread, _ in spreads)):
        return 1.0
    freedom = 1 / math.fsum((spread / total) ** 2 / least for spread, least in spreads)
    return float(t.ppf(0.5 + level / 2, freedom)) / NormalDist().inv_cdf(0.5 + level / 2)


def macro_resamples(values: Mapping[str, Sequence[float]], seed: int, resamples: int = 10_000) -> NDArray[np.float64]:
    """Draws the macro average again and again, each client's outcomes resampled within the client.

    A draw's deviation from a client's mean is scaled by sqrt(n / (n - 1)): resampling n outcomes varies by so much less
    than drawing n new ones. Two arms on the same questions are drawn alike: the same seed picks the same questions, so
    that what is computed of both, draw by draw, is paired.

    Args: as `macro_mean`.

    Returns:
        The averages, `[resamples]`.

    Raises:
        ValueError: as `macro_mean`.
    """
    strata = _strata(values)
    means = np.zeros(resamples)
    for name, stratum in strata.items():
        mean, n = stratum.mean(), len(stratum)
        drawn = _resampled_means(stratum, resamples, seed_of(seed, "bootstrap", name))
        means += mean + (drawn - mean) * math.sqrt(n / max(1, n - 1))
    return means / len(strata)


def has_spread(values: Mapping[str, Sequence[float]]) -> bool:
    """Says whether losses have an interval: every client has `LEAST_OUTCOMES` or more.

    A single loss does not vary from resample to resample, so that it would count as certain. Two are alike by chance so
    often that an average over clients of 2 and of 30 losses is outside its interval in 13%, where 5% is said.

    Args:
        values: client -> its outcomes; a client without outcomes does not count.
    """
    return min((len(found) for found in values.values() if len(found)), default=0) >= LEAST_OUTCOMES


def told_ends(found: Interval | Difference, losses: Mapping[str, Sequence[float]] | None = None) -> dict[str, float]:
    """Gives the ends of an interval as a row has them; empty where they would pass for more certainty than there is.

    Args:
        found: the interval.
        losses: client -> the outcomes that it is a bootstrap of; None where it is a score interval, of shares.

    Returns:
        `low` and `high`, or nothing: of too few outcomes (`has_spread`), or of ends that do not differ.
    """
    told = found.has_width and (losses is None or has_spread(losses))
    return {"low": found.low, "high": found.high} if told else {}


def paired_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    seed: int,
    level: float = LEVEL,
    resamples: int = 10_000,
    shares: bool = False,
) -> Difference:
    """Compares two arms on the same questions of one client; `macro_difference` of one client.

    Args: as `macro_difference`, with one sequence each.
    """
    return macro_difference({"": a}, {"": b}, seed, level, resamples, shares)


def macro_difference(
    a: Mapping[str, Sequence[float]],
    b: Mapping[str, Sequence[float]],
    seed: int,
    level: float = LEVEL,
    resamples: int = 10_000,
    shares: bool = False,
) -> Difference:
    """Compares two arms on the same questions, averaged over clients, question by question.

    Args:
        a: client -> outcomes of the first arm.
        b: client -> outcomes of the second arm on the same questions, in the same order.
        seed: names the random stream.
        level: confidence, between 0 and 1.
        resamples: number of bootstrap resamples.
        shares: every outcome is within 0 and 1. See `macro_mean`.

    Returns:
        The mean of a - b with its interval.

    Raises:
        ValueError: the arms have different clients or different numbers of outcomes, or there are none.

    Source: of shares `fednl.evaluation.shares.macro_gap`; all else as in `macro_mean`.
    """
    if set(a) != set(b):
        raise ValueError("a paired comparison needs the same clients in both arms")
    gaps = {name: [float(x) - float(y) for x, y in zip(a[name], b[name], strict=True)] for name in a}
    if not shares:
        mean = macro_mean(gaps, seed, level, resamples)
        return Difference(mean.value, mean.low, mean.high, mean.n)
    strata = _strata(gaps)
    value = math.fsum(float(stratum.mean()) for stratum in strata.values()) / len(strata)
    down, up = macro_gap([finite(a[name]) for name in strata], [finite(b[name]) for name in strata], level)
    n = sum(map(len, strata.values()))
    return Difference(value, max(-1.0, value - down), min(1.0, value + up), n)


def _strata(values: Mapping[str, Sequence[float]]) -> dict[str, NDArray[np.float64]]:
    strata = {name: finite(values[name]) for name in sorted(values) if len(values[name])}
    if not strata:
        raise ValueError("a macro average needs at least one outcome")
    return strata


def _resampled_means(stratum: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Draws with replacement `resamples` times and averages each draw."""
    rng = np.random.default_rng(seed)
    step = max(1, _BLOCK // len(stratum))
    blocks = []
    for start in range(0, resamples, step):
        picks = rng.integers(len(stratum), size=(min(step, resamples - start), len(stratum)))
        blocks.append(stratum[picks].mean(axis=1))
    return np.concatenate(blocks)
