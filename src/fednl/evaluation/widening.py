"""How far a macro average can be from what was seen, where each client's outcomes are all alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def widened(
    strata: Mapping[str, NDArray[np.float64]], value: float, bounds: tuple[float, float], level: float
) -> tuple[float, float]:
    """Gives the interval of the averages under which such outcomes are still no surprise.

    Args:
        strata: client -> its outcomes, all alike, at least one.
        value: their macro average.
        bounds: the least and the largest value an outcome can have.
        level: confidence; outcomes of probability (1 - level) / 2 or more are no surprise.

    Source: ours; for one client Clopper and Pearson 1934 at its end point.
    """
    sizes, means = [len(stratum) for stratum in strata.values()], [float(stratum[0]) for stratum in strata.values()]
    down = _farthest(sizes, [mean - bounds[0] for mean in means], level)
    up = _farthest(sizes, [bounds[1] - mean for mean in means], level)
    return value - down / len(strata), value + up / len(strata)


def _farthest(sizes: Sequence[int], weights: Sequence[float], level: float) -> float:
    """The largest sum of `weight * share` at which the clients' outcomes still show none of the shares of others.

    That has probability `prod (1 - share)^size`, which is to be (1 - level) / 2. Where a share is not 0, the marginal
    costs agree: `1 - share = scale * size / weight`.
    """
    budget = math.log((1.0 - level) / 2)
    moved = [(size, weight) for size, weight in zip(sizes, weights, strict=True) if weight > 0]
    while moved:
        total = sum(size for size, _ in moved)
        scale = (budget - math.fsum(size * math.log(size / weight) for size, weight in moved)) / total
        kept = [(size, weight) for size, weight in moved if scale + math.log(size / weight) < 0]
        if len(kept) == len(moved):
            return math.fsum(weight - math.exp(scale) * size for size, weight in moved)
        moved = kept
    return 0.0
