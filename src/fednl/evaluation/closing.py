"""How much of the way from a floor to a ceiling a method goes. Imports no torch."""

from __future__ import annotations

import numpy as np

from fednl.evaluation.comparing import Values, compared
from fednl.evaluation.statistics import (
    LEAST_OUTCOMES,
    LEVEL,
    Interval,
    macro_difference,
    macro_resamples,
    stretch,
)

NOT_APART = "floor and ceiling are not told apart"
WORSE = "the ceiling is worse than the floor"
NO_WIDTH = "the difference of floor and ceiling does not vary, so it has no interval"
_LEAST_ANSWERS = 2


def share_closed(
    ours: Values, floor: Values, ceiling: Values, seed: int, resamples: int = 10_000, *, shares: bool
) -> Interval | str:
    """Gives (ours - floor) / (ceiling - floor) of the macro averages, with a paired bootstrap interval over questions.

    It is 0 at the floor and 1 at the ceiling, and can be below or above.

    Args:
        ours: client -> its outcomes, in the order of the questions.
        floor: the same of the floor, on the same questions.
        ceiling: the same of the ceiling.
        seed: names the random stream.
        resamples: bootstrap resamples.
        shares: outcomes are right (1) or wrong (0); else they are losses, of which less is better.

    Returns:
        The share; or in words why there is none. The ceiling must be better than the floor, by the test that gives
            every table its verdicts (`fednl.evaluation.comparing.compared`): else there is no way to go a share of. And
            a client has three or more losses, or two or more answers: a single one does not vary from draw to draw. The
            interval has no width where ours and the ceiling (or the floor) have the same outcomes: write it with
            `fednl.evaluation.statistics.told_ends`, which then gives none.

    Raises:
        ValueError: the three do not hold the same clients with the same numbers of outcomes.

    Source: ours; the ratio's interval is the bootstrap's, scaled as in `macro_mean`, and its ends may be far where the
        way is short.
    """
    way = compared(ceiling, floor, seed, shares=shares, resamples=resamples)
    gap, gain = way.gap, macro_difference(ours, floor, seed, LEVEL, resamples, shares)
    least = _LEAST_ANSWERS if shares else LEAST_OUTCOMES
    if min((len(found) for found in ours.values() if len(found)), default=0) < least:
        return f"a client has fewer than {least} outcomes, which are too few to vary"
    if way.verdict is None:
        return NO_WIDTH
    if way.verdict != "better":
        return WORSE if way.told_apart else NOT_APART
    drawn = [macro_resamples(values, seed, resamples) for values in (ours, floor, ceiling)]
    wide = stretch({name: np.subtract(ceiling[name], floor[name]).tolist() for name in ceiling})
    with np.errstate(divide="ignore", invalid="ignore"):
        gains, ways = (
            mean + wide * (drawn[which] - drawn[1] - mean) for which, mean in ((0, gain.mean), (2, gap.mean))
        )
        ratios = gains / ways
    low, high = (float(end) for end in np.quantile(ratios[np.isfinite(ratios)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    return Interval(gain.mean / gap.mean, low, high, gain.n)
