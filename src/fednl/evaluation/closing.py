"""How much of the way from a floor to a ceiling a method goes. Imports no torch."""

from __future__ import annotations

import numpy as np

from fednl.evaluation.comparing import Values, compared
from fednl.evaluation.statistics import LEVEL, Interval, has_spread, macro_difference, macro_resamples, stretch


def share_closed(
    ours: Values, floor: Values, ceiling: Values, seed: int, resamples: int = 10_000, *, shares: bool
) -> Interval | None:
    """Gives (ours - floor) / (ceiling - floor) of the macro averages, with a paired bootstrap interval over questions.

    It is 0 at the floor and 1 at the ceiling, and can be below or above; whether higher or lower is better cancels out.

    Args:
        ours: client -> its outcomes, in the order of the questions.
        floor: the same of the floor, on the same questions.
        ceiling: the same of the ceiling.
        seed: names the random stream.
        resamples: bootstrap resamples.
        shares: outcomes are right (1) or wrong (0); else they are losses.

    Returns:
        The share; None where floor and ceiling are not told apart, by the test that gives every table its verdicts
            (`fednl.evaluation.comparing.compared`): then there is no way to go a share of. Or where a client has too
            few outcomes to vary (`has_spread`). Its interval has no width where ours and the ceiling (or the floor)
            have the same outcomes: write it with `fednl.evaluation.statistics.told_ends`, which then gives none.

    Raises:
        ValueError: the three do not hold the same clients with the same numbers of outcomes.

    Source: ours; the ratio's interval is the bootstrap's, scaled as in `macro_mean`, and its ends may be far where the
        way is short.
    """
    way = compared(ceiling, floor, seed, shares=shares, resamples=resamples)
    gap, gain = way.gap, macro_difference(ours, floor, seed, LEVEL, resamples, shares)
    if not way.told_apart or not has_spread(ours):
        return None
    drawn = [macro_resamples(values, seed, resamples) for values in (ours, floor, ceiling)]
    wide = stretch({name: np.subtract(ceiling[name], floor[name]).tolist() for name in ceiling})
    with np.errstate(divide="ignore", invalid="ignore"):
        gains, ways = (
            mean + wide * (drawn[which] - drawn[1] - mean) for which, mean in ((0, gain.mean), (2, gap.mean))
        )
        ratios = gains / ways
    low, high = (float(end) for end in np.quantile(ratios[np.isfinite(ratios)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    return Interval(gain.mean / gap.mean, low, high, gain.n)
