"""Whether two arms differ on the same questions: the difference, its interval, a test of the same. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fednl.evaluation.f1 import Answers, f1_difference, f1_p
from fednl.evaluation.shares import macro_mcnemar
from fednl.evaluation.statistics import LEVEL, UNDECIDED, Difference, Verdict, macro_difference, told_ends

Values = Mapping[str, Sequence[float]]
"""Client -> its outcomes, in the order of the questions."""


@dataclass(frozen=True)
class Compared:
    """Two arms, first minus second.

    Attributes:
        gap: the difference of their macro averages, or of macro-F1.
        ends: its interval as a row has it; empty where it would pass for certainty, as of `told_ends`.
        verdict: of the first arm; None where there is no interval.
        p: of the test of the same difference, of shares and of macro-F1; None of losses.
    """

    gap: Difference
    ends: Mapping[str, float]
    verdict: Verdict | None
    p: float | None = None

    @property
    def told_apart(self) -> bool:
        """Whether one arm is better than the other."""
        return self.verdict not in (None, UNDECIDED)


def compared(a: Values, b: Values, seed: int, *, shares: bool, resamples: int = 10_000) -> Compared:
    """Compares the macro averages of two arms; every table's verdict, and whether a way from one to the other is there.

    An arm is better or worse where the interval of the difference excludes zero and, of shares, the exact test of that
    difference (`macro_mcnemar`) rejects at 5% too: four wins and no loss of thirty push an interval off zero, yet are
    nothing that coins would not do.

    Args:
        a: outcomes of the first arm.
        b: the other arm's, on the same questions.
        seed: names the bootstrap's random stream.
        shares: outcomes are right (1) or wrong (0); else they are losses, of which less is better.
        resamples: bootstrap resamples.

    Raises:
        ValueError: as `macro_difference`.
    """
    gap = macro_difference(a, b, seed, LEVEL, resamples, shares)
    p = macro_mcnemar([a[name] for name in a], [b[name] for name in a]) if shares else None
    return _judged(gap, told_ends(gap, None if shares else a), p, higher_is_better=shares)


def compared_f1(a: Answers, b: Answers, seed: int, *, resamples: int = 10_000) -> Compared:
    """Compares the macro-F1 of two arms: the interval must exclude zero, and the test of macro-F1 (`f1_p`) reject.

    Args:
        a: answers of the first arm.
        b: the other arm's, to the same questions.
        seed: names the random streams.
        resamples: bootstrap resamples, and draws of the test.
    """
    gap = f1_difference(a, b, seed, LEVEL, resamples)
    return _judged(gap, told_ends(gap), f1_p(a, b, seed, resamples), higher_is_better=True)


def _judged(gap: Difference, told: Mapping[str, float], p: float | None, *, higher_is_better: bool) -> Compared:
    if not told:
        return Compared(gap, told, None, p)
    verdict = UNDECIDED if p is not None and p > 1 - LEVEL else gap.verdict(higher_is_better)
    return Compared(gap, told, verdict, p)
