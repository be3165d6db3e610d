"""Can one tell from what was shared which texts it was made of? The attacker's scores, and how well they do.

For trained rules the score of a text is how much its loss fell from the start of training to its end: what was trained
on falls more than fresh text of the same kind. For a mean of activations it is how far the text's own activations point
the same way. An attacker who knows what was shared, and the public backbone, can do either; stronger ones exist, so a
low figure is no proof, while a high one is a leak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

from fednl.evaluation.statistics import LEVEL, Interval

if TYPE_CHECKING:
    from torch import Tensor


def loss_drops(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Gives the score of each text.

    Args:
        before: losses under the rules that training began with, in nats.
        after: losses of the same texts, in the same order, under the trained ones.

    Source: the difference to a reference model, as Carlini et al. 2022 (arXiv 2112.03570), section III.
    """
    return [first - last for first, last in zip(before, after, strict=True)]


def traces(texts: Tensor, released: Tensor, known: Tensor) -> list[float]:
    """Gives the score of each text: the cosine between it and a mean that may be made of it, in what sets them apart.

    Both are taken less the mean of texts of the attacker's own, number by number in their standard deviations.

    Args:
        texts: what each candidate leaves in the backbone, `[texts, numbers]`.
        released: the mean that was shared, `[numbers]`.
        known: the attacker's own texts, `[at least 2, numbers]`.

    Source: the statistic of Homer et al. 2008 (PLoS Genetics 4) in the form of Dwork et al. 2015 (FOCS, robust
    traceability); standard deviations and cosine ours. In float64.
    """
    known, texts, released = (x.cpu() for x in (known, texts, released))  # not every device has float64
    centre, spread = known.double().mean(0), known.double().std(0).clamp(min=1e-12)
    own, shared = (texts.double() - centre) / spread, (released.double() - centre) / spread
    cosines = own @ shared / (own.norm(dim=1) * shared.norm()).clamp(min=1e-12)
    return [float(cosine) for cosine in cosines]


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
