"""What several training seeds say together: only they tell a method from one of its runs. Imports no torch.

An interval over questions says how sure one run's number is. Another seed trains other rules on other questions; the
spread over seeds holds both, and no claim about a method is made without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fednl.evaluation.measures import METRICS
from fednl.evaluation.rows import MACRO, Row
from fednl.evaluation.statistics import LEVEL, Difference

LEAST_SEEDS = 3
"""Fewer training seeds than this carry no claim, whatever their interval."""
TOO_FEW = f"no claim: fewer than {LEAST_SEEDS} seeds"


@dataclass(frozen=True)
class OverSeeds:
    """One comparison over training seeds.

    Args:
        method: the first arm.
        baseline: the second arm.
        of: the metric.
        by_seed: the macro difference, first minus second, by seed.
        interval: their mean with Student's interval; None for one seed.
        verdict: `"better"` or `"worse"` where the interval excludes 0 and there are enough seeds.
    """

    method: str
    baseline: str
    of: str
    by_seed: Mapping[int, float]
    interval: Difference | None
    verdict: str


def mean_over_seeds(by_seed: Mapping[int, float], level: float = LEVEL) -> Difference:
    """Gives the mean of one number per training seed, with Student's interval.

    Args:
        by_seed: seed -> the number; at least two, finite.
        level: confidence, between 0 and 1.

    Returns:
        The mean, its interval, and the number of seeds as n.

    Raises:
        ValueError: fewer than two seeds, or a number that is not finite.

    Source: Student, Biometrika 6 (1908) 1-25; n - 1 degrees of freedom.
    """
    from scipy.stats import t

    values = [float(by_seed[seed]) for seed in sorted(by_seed)]
    if len(values) < 2 or not all(map(math.isfinite, values)):
        raise ValueError("an interval over seeds needs two or more finite numbers")
    n, mean = len(values), math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(t.ppf(0.5 + level / 2, n - 1)) * spread / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, n)


def over_seeds(runs: Sequence[Sequence[Row]]) -> list[OverSeeds]:
    """Compares arms over the runs of several seeds, comparison by comparison in the order of the first run.

    Args:
        runs: the rows of one results file each, as `fednl.evaluation.rows.result_rows` makes them, of runs that
            differ in nothing but their seed. A comparison that a run lacks counts the others only.
    """
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for rows in runs:
        for row in rows:
            if row["metric"] == "difference" and row.get("client") == MACRO and "seed" in row:
                found.setdefault((row["method"], row["baseline"], row["of"]), {})[int(row["seed"])] = row["value"]
    return [OverSeeds(*which, by_seed, *_judged(which[2], by_seed)) for which, by_seed in found.items()]


def _judged(of: str, by_seed: Mapping[int, float]) -> tuple[Difference | None, str]:
    if len(by_seed) < 2:
        return None, TOO_FEW
    interval = mean_over_seeds(by_seed)
    enough = len(by_seed) >= LEAST_SEEDS
    return interval, str(interval.verdict(higher_is_better=METRICS[of].higher_is_better)) if enough else TOO_FEW


def same_but_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives settings without what the runs of several seeds may differ in: the seed, and where they are written.

    Args:
        config: a run's `config.json`; not modified.
    """
    return {name: keys for name, keys in config.items() if name not in ("run", "format")}
