"""Can one tell from trained rules which texts they were trained on? The attacker's score, and how well it does.

The score of a text is how much its loss fell from the start of training to its end: what was trained on falls more than
fresh text of the same kind. An attacker who knows the rules at both ends, and nothing else, can do this; stronger ones
exist, so a low figure is no proof, while a high one is a leak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from fednl.evaluation.statistics import LEVEL, Interval


def loss_drops(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Gives the score of each text.

    Args:
        before: losses under the rules that training began with, in nats.
        after: losses of the same texts, in the same order, under the trained ones.

    Source: the difference to a reference model, as Carlini et al. 2022 (arXiv 2112.03570), section III.
    """
    return [first - last for first, last in zip(before, after, strict=True)]


def auc(members: Sequence[float], others: Sequence[float], level: float = LEVEL) -> Interval:
    """Gives the chance that a random member scores above a random other text; a tie counts half, guessing is 0.5.

    Args:
        members: scores of texts that were trained on; at least one, all finite.
        others: scores of texts of the same kind that were not.
        level: of the interval.

    Returns:
        The area under the ROC curve with its interval, cut to [0, 1]; `n` is the number of all texts.

    Raises:
        ValueError: one side is empty, or a score is not finite.

    Source: Hanley and McNeil 1982, Radiology 143, equation 2 for the variance; where the area is 0 or 1, that of an
    area half a pair inside.
    """
    if not members or not others or not all(map(math.isfinite, [*members, *others])):
        raise ValueError("auc needs finite scores of members and of others")
    inside, outside = len(members), len(others)
    wins = sum((member > other) + 0.5 * (member == other) for member in members for other in others)
    value, margin = wins / (inside * outside), 0.5 / (inside * outside)
    area = min(max(value, margin), 1 - margin)
    both, twice = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (inside - 1) * (both - area**2) + (outside - 1) * (twice - area**2)
    half = NormalDist().inv_cdf(0.5 + level / 2) * math.sqrt(spread / (inside * outside))
    return Interval(value, max(0.0, value - half), min(1.0, value + half), inside + outside)
