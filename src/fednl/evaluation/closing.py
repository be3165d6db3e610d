"""How much of the way from a floor to a ceiling a method goes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fednl.evaluation.statistics import LEVEL, Interval, has_spread, macro_difference, macro_resamples, stretch

Values = Mapping[str, Sequence[float]]


def share_closed(ours: Values, floor: Values, ceiling: Values, seed: int, resamples: int = 10_000) -> Interval | None:
    """Gives (ours - floor) / (ceiling - floor) of the macro averages, with a paired bootstrap interval over questions.

    It is 0 at the floor and 1 at the ceiling, and can be below or above; whether higher or lower is better cancels out.

    Args:
        ours: client -> its outcomes, in the order of the questions.
        floor: the same of the floor, on the same questions.
        ceiling: the same of the ceiling.
        seed: names the random stream.
        resamples: bootstrap resamples.

    Returns:
        The share; None where the 95% interval of ceiling minus floor holds 0: then there is no way to go a share of. Or
            where a client has one outcome, which does not vary.

    Raises:
        ValueError: the three do not hold the same clients with the same numbers of outcomes.

    Source: ours; the ratio's interval is the bootstrap's, scaled as in `macro_mean`, and its ends may be far where the
        way is short.
    """
    gap = macro_difference(ceiling, floor, seed, LEVEL, resamples)
    gain = macro_difference(ours, floor, seed, LEVEL, resamples)
    if gap.low <= 0 <= gap.high or not has_spread(ours):
        return None
    drawn = [macro_resamples(values, seed, resamples) for values in (ours, floor, ceiling)]
    wide = stretch({name: np.subtract(ceiling[name], floor[name]).tolist() for name in ceiling})
    with np.errstate(divide="ignore", invalid="ignore"):
        gains, ways = (
            mean + wide * (drawn[which] - drawn[1] - mean) for which, mean in ((0, gain.mean), (2, gap.mean))
        )
        shares = gains / ways
    low, high = (float(end) for end in np.quantile(shares[np.isfinite(shares)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    return Interval(gain.mean / gap.mean, low, high, gain.n)
