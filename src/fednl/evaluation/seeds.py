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
NO_SPREAD = "no claim: the same at every seed, so no interval"
NOT_EVERYWHERE = "no mean: at some seeds there is no share"

FREE = frozenset(
    {
        ("backbone", "device"),
        ("evaluation", "arms"),
        ("evaluation", "batch"),
        ("federation", "parallel-clients"),
        ("federation", "keep-checkpoints"),
        ("run", "out"),
    }
)
"""Settings that change how fast a run goes or what is looked at afterwards, not what it trains, as (section, key)."""


@dataclass(frozen=True)
class OverSeeds:
    """One comparison over training seeds.

    Args:
        method: the first arm.
        baseline: the second arm; of `share_closed` the floor and the ceiling, in words.
        of: the metric.
        by_seed: by seed the macro difference, first minus second, or the share of the way that is closed.
        interval: their mean with Student's interval, which has no width where they do not vary; None for one seed, and
            where they do not count.
        verdict: `"better"` or `"worse"` where the interval excludes 0 and there are enough seeds; else why there is no
            such word, or nothing, of a share.
        metric: `"difference"` or `"share_closed"`.
        from_token: where the bin of a text begins that is compared; None where whole answers are.
    """

    method: str
    baseline: str
    of: str
    by_seed: Mapping[int, float]
    interval: Difference | None
    verdict: str
    metric: str = "difference"
    from_token: int | None = None


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

    What does not count at one seed, as the `note` of its row says, counts at none: it keeps its note and is no claim.

    Args:
        runs: the rows of one results file each, as `fednl.evaluation.rows.result_rows` or `streaming_rows` of
            `fednl.evaluation.streaming` makes them, bin by bin, of runs that differ in nothing but their seed. A
            comparison that a run lacks counts the others only.
    """
    found: dict[tuple[str, str, str, str, int | None], list[Row]] = {}
    for row in (row for rows in runs for row in rows if "seed" in row):
        if row["metric"] == "difference" and (row.get("client") == MACRO or "bin" in row):
            which = ("difference", row["method"], row["baseline"], row["of"], row.get("from_token"))
        elif row["metric"] == "share_closed":
            which = ("share_closed", row["method"], f"{row['floor']} to {row['ceiling']}", row["of"], None)
        else:
            continue
        found.setdefault(which, []).append(row)
    return [_judged(*which, rows) for which, rows in found.items()]


def _judged(metric: str, method: str, baseline: str, of: str, from_token: int | None, rows: Sequence[Row]) -> OverSeeds:
    by_seed = {int(row["seed"]): float(row["value"]) for row in rows if "value" in row}
    notes = dict.fromkeys(row["note"] for row in rows if "note" in row)
    interval = None
    if notes:
        verdict = f"{'; '.join(notes)}, does not count"
    elif any("value" not in row for row in rows):
        whys = dict.fromkeys(row["why"] for row in rows if "why" in row)
        verdict = f"{NOT_EVERYWHERE}{', as ' if whys else ''}{'; '.join(whys)}"
    elif len(by_seed) < 2:
        verdict = TOO_FEW
    else:
        interval = mean_over_seeds(by_seed)
        verdict = _verdict(interval, METRICS[of].higher_is_better) if metric == "difference" else ""
    return OverSeeds(method, baseline, of, by_seed, interval, verdict, metric, from_token)


def _verdict(interval: Difference, higher_is_better: bool) -> str:
    if interval.n < LEAST_SEEDS:
        return TOO_FEW
    # Three shares of the same n are often the very same: 2% of equal arms would be called better or worse for that.
    if interval.mean and not interval.has_width:
        return NO_SPREAD
    return str(interval.verdict(higher_is_better=higher_is_better))


def same_but_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives settings without what the runs of several seeds may differ in: the seed, and what is `FREE`.

    Args:
        config: a run's `config.json`; not modified.
    """
    free = FREE | {("run", "seed")}
    kept = {
        name: {key: value for key, value in keys.items() if (name, key) not in free} if isinstance(keys, dict) else keys
        for name, keys in config.items()
        if name != "format"
    }
    return {name: keys for name, keys in kept.items() if keys}
