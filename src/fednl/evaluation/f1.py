"""Macro-F1 with intervals: every class counts once, however rare it is. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fednl.evaluation.shares import wilson
from fednl.evaluation.statistics import LEVEL, Difference, Interval
from fednl.seeding import seed_of

Answers = Mapping[str, Sequence[tuple[int, int]]]
"""Client -> (right class, chosen class) per question."""

_BLOCK = 1_000_000  # numbers drawn at once: bounds the memory, not the result's quality


def macro_f1(answers: Sequence[tuple[int, int]]) -> float:
    """Gives the mean over classes of F1 = 2 TP / (2 TP + FP + FN); the classes are those that are right anywhere.

    A class that is only ever chosen, and never right, has no F1 of its own; it costs the others, where it was chosen.

    Args:
        answers: (right class, chosen class) per question, at least one.

    Source: as `f1_score(average="macro", labels=sorted(set(gold)))` of scikit-learn.
    """
    size = 1 + max(max(pair) for pair in answers)
    pairs = np.asarray(answers)
    table = np.bincount(pairs[:, 0] * size + pairs[:, 1], minlength=size * size).reshape(1, size, size)
    return float(_scores(table, sorted(set(pairs[:, 0].tolist())))[0])


def f1_interval(clients: Answers, seed: int, level: float = LEVEL, resamples: int = 10_000) -> Interval:
    """Gives macro-F1 over all clients' answers, with a bootstrap interval; resampled within clients.

    Deviations are scaled for few answers as in `fednl.evaluation.statistics.macro_mean`. Where no resample differs, the
    interval is as wide as the score interval of as many answers that are all right.

    Args:
        clients: at least one answer.
        seed: names the random stream.
        level: confidence, between 0 and 1.
        resamples: number of bootstrap resamples.
    """
    everything = [pair for found in clients.values() for pair in found]
    value = macro_f1(everything)
    low, high = _ends(_resampled(clients, seed, resamples), value, clients, level)
    return Interval(value, max(0.0, low), min(1.0, high), len(everything))


def f1_difference(a: Answers, b: Answers, seed: int, level: float = LEVEL, resamples: int = 10_000) -> Difference:
    """Compares two arms' macro-F1 on the same questions; each resample draws the same questions for both.

    Args:
        a: answers of the first arm.
        b: the other arm's answers to the same questions, in the same order.
        seed: names the random stream.
        level: confidence, between 0 and 1.
        resamples: number of bootstrap resamples.
    """
    gaps = _resampled(a, seed, resamples) - _resampled(b, seed, resamples)
    first, second = ([pair for found in arm.values() for pair in found] for arm in (a, b))
    value = macro_f1(first) - macro_f1(second)
    low, high = _ends(gaps, value, a, level)
    return Difference(value, max(-1.0, low), min(1.0, high), len(first))


def f1_p(a: Answers, b: Answers, seed: int, resamples: int = 10_000) -> float:
    """Tests whether two arms' macro-F1 differs: how often arms that swap answers at random differ as much.

    Where no arm is the better, either answer to a question could be either arm's. Each draw swaps the two answers of
    about half the questions; p counts the draws whose difference is as large or larger, in either direction. Unlike
    McNemar's test, which asks who is right more often, it tests macro-F1 itself.

    Args:
        a: answers of the first arm.
        b: the other arm's answers to the same questions, in the same order.
        seed: names the random stream.
        resamples: how many draws; p is at least 1 / (1 + resamples).

    Source: approximate randomisation, A. Yeh, COLING (2000) 947-953; observed answers count as a draw, as in Phipson
        and Smyth, Stat. Appl. Genet. Mol. Biol. 9 (2010) 39.
    """
    pairs = [both for name in sorted(a) for both in zip(a[name], b[name], strict=True)]
    kinds = Counter((gold, x, y) for (gold, x), (_, y) in pairs)
    size, classes = 1 + max(max(kind) for kind in kinds), sorted({gold for gold, _, _ in kinds})
    rng = np.random.default_rng(seed_of(seed, "swaps"))
    first, second = (np.zeros((resamples, size, size), dtype=np.int64) for _ in range(2))
    for (gold, x, y), count in sorted(kinds.items()):
        swapped = rng.binomial(count, 0.5, size=resamples)
        for table, mine, other in ((first, x, y), (second, y, x)):
            table[:, gold, mine] += count - swapped
            table[:, gold, other] += swapped
    drawn = np.abs(_scores(first, classes) - _scores(second, classes))
    observed = abs(macro_f1([x for x, _ in pairs]) - macro_f1([y for _, y in pairs]))
    return (1 + int((drawn >= observed - 1e-12).sum())) / (1 + resamples)


def _ends(drawn: NDArray[np.float64], value: float, clients: Answers, level: float) -> tuple[float, float]:
    """The interval around a value, from its resamples; without any degree of freedom everything is possible."""
    from scipy.stats import norm, t

    sizes = [len(found) for found in clients.values() if found]
    n, freedom = sum(sizes), sum(sizes) - len(sizes)
    if not freedom:
        return -math.inf, math.inf
    low, high = (float(end) - value for end in np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2]))
    if low == high == 0:
        low, high = wilson(n, n, level)[0] - 1, 1 - wilson(n, n, level)[0]
    wide = math.sqrt(n / freedom) * float(t.ppf(0.5 + level / 2, freedom) / norm.ppf(0.5 + level / 2))
    return value + wide * min(0.0, low), value + wide * max(0.0, high)


def _resampled(clients: Answers, seed: int, resamples: int) -> NDArray[np.float64]:
    """Macro-F1 of every resample; which questions are drawn depends on seed, client and their number alone."""
    size = 1 + max(max(pair) for found in clients.values() for pair in found)
    classes = sorted({gold for found in clients.values() for gold, _ in found})
    table = np.zeros((resamples, size, size), dtype=np.int64)
    for name in sorted(clients):
        codes = np.asarray([gold * size + chosen for gold, chosen in clients[name]], dtype=np.int64)
        if not len(codes):
            continue
        rng = np.random.default_rng(seed_of(seed, "bootstrap", name))
        step = max(1, _BLOCK // len(codes))
        for start in range(0, resamples, step):
            rows = min(step, resamples - start)
            picks = codes[rng.integers(len(codes), size=(rows, len(codes)))]
            flat = (picks + np.arange(rows)[:, None] * size * size).ravel()
            counted = np.bincount(flat, minlength=rows * size * size)
            table[start : start + rows] += counted.reshape(rows, size, size)
    return _scores(table, classes)


def _scores(table: NDArray[np.int64], classes: Sequence[int]) -> NDArray[np.float64]:
    """Macro-F1 of confusion tables `[resamples, right, chosen]`; a class that a resample lost counts as 0."""
    right = np.diagonal(table, axis1=1, axis2=2)
    whole = table.sum(2) + table.sum(1)
    scores = np.divide(2 * right, whole, out=np.zeros(right.shape), where=whole > 0)
    mean: NDArray[np.float64] = scores[:, list(classes)].mean(axis=1)
    return mean
