"""Macro-F1: the definition on small tables, and intervals that see what the answers leave open."""

from __future__ import annotations

import itertools
import random

import pytest

from fednl.evaluation.f1 import f1_difference, f1_interval, f1_p, macro_f1
from fednl.evaluation.shares import wilson
from fednl.evaluation.statistics import Difference, Interval


def by_definition(answers: list[tuple[int, int]]) -> float:
    scores = []
    for label in {gold for gold, _ in answers}:
        hit = sum(gold == chosen == label for gold, chosen in answers)
        wrong = sum((gold == label) != (chosen == label) for gold, chosen in answers)
        scores.append(2 * hit / (2 * hit + wrong))
    return sum(scores) / len(scores)


def test_it_is_the_mean_over_classes_of_f1() -> None:
    assert macro_f1([(0, 0), (1, 1), (2, 2)]) == 1.0
    assert macro_f1([(0, 1), (1, 0)]) == 0.0
    # Class 0: 2 hits, 1 false alarm; class 1: 0 hits: (2*2/(4+1) + 0) / 2. Accuracy would be 2/3.
    assert macro_f1([(0, 0), (0, 0), (1, 0)]) == pytest.approx(0.4)
    # A class that is only chosen has no F1 of its own.
    assert macro_f1([(0, 0), (0, 3)]) == pytest.approx(2 / 3)
    draw = random.Random(0)
    for _ in range(50):
        answers = [(draw.randrange(4), draw.randrange(5)) for _ in range(draw.randint(1, 20))]
        assert macro_f1(answers) == pytest.approx(by_definition(answers))


def guesses(seed: int, n: int, right: float) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(gold, gold if draw.random() < right else draw.randrange(3)) for gold in (i % 3 for i in range(n))]


def test_its_interval_holds_it_narrows_with_n_and_does_not_see_the_order_of_clients() -> None:
    few = {"a": guesses(1, 15, 0.6), "b": guesses(2, 15, 0.6)}
    many = {"a": guesses(1, 300, 0.6), "b": guesses(2, 300, 0.6)}
    narrow, wide = f1_interval(many, 0, resamples=2000), f1_interval(few, 0, resamples=2000)
    assert wide.low < wide.value < wide.high and narrow.low < narrow.value < narrow.high
    assert (narrow.high - narrow.low) < 0.4 * (wide.high - wide.low)
    assert (wide.n, narrow.n) == (30, 600)
    assert f1_interval(dict(reversed(few.items())), 0, resamples=2000) == wide


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """With answers right at rate r, else uniform over 3 classes, every class has F1 r + (1 - r) / 3."""
    truth = 0.6 + 0.4 / 3
    hits = 0
    for seed in range(120):
        interval = f1_interval({"a": guesses(seed, 90, 0.6)}, seed, resamples=400)
        hits += interval.low <= truth <= interval.high
    assert 102 <= hits <= 120


def test_few_answers_are_no_certainty() -> None:
    assert f1_interval({"a": [(0, 0)]}, 0) == Interval(1.0, 0.0, 1.0, 1)
    assert f1_difference({"a": [(0, 0)]}, {"a": [(0, 1)]}, 0) == Difference(1.0, -1.0, 1.0, 1)
    thirty = f1_interval({"a": [(one % 2, one % 2) for one in range(30)]}, 0, resamples=200)
    assert thirty.value == thirty.high == 1.0 and thirty.low == pytest.approx(wilson(30, 30)[0], abs=0.01)


def test_a_difference_is_paired() -> None:
    a = {"a": guesses(1, 60, 0.5)}
    same = f1_difference(a, a, 0, resamples=500)
    assert same.mean == 0.0 and same.low < 0 < same.high < 0.1  # sixty equal answers are no certainty
    better = {"a": [(gold, gold) for gold, _ in a["a"]]}
    gap = f1_difference(better, a, 0, resamples=500)
    assert gap.low > 0 and gap.mean == pytest.approx(1 - macro_f1(a["a"])) and gap.n == 60


def test_its_test_counts_the_swaps_of_answers_that_differ_as_much() -> None:
    """Against every one of the 2^6 ways to swap; arms that never differ give 1."""
    a = {"a": [(0, 0), (1, 1), (0, 0)], "b": [(1, 1), (2, 2), (0, 0)]}
    b = {"a": [(0, 1), (1, 1), (0, 0)], "b": [(1, 0), (2, 0), (0, 2)]}
    pairs = [both for name in a for both in zip(a[name], b[name], strict=True)]
    observed = abs(macro_f1([x for x, _ in pairs]) - macro_f1([y for _, y in pairs]))
    falls = []
    for swaps in itertools.product((0, 1), repeat=len(pairs)):
        first, second = ([both[swap ^ arm] for both, swap in zip(pairs, swaps, strict=True)] for arm in (0, 1))
        falls.append(abs(macro_f1(first) - macro_f1(second)) >= observed - 1e-12)
    assert f1_p(a, b, 0, 20_000) == pytest.approx(sum(falls) / len(falls), abs=0.015)
    assert f1_p(a, b, 0, 500) == pytest.approx(f1_p(b, a, 0, 500), abs=0.05)
    assert f1_p(a, a, 0, 100) == 1.0


def test_equal_arms_are_seldom_told_apart_by_it() -> None:
    told = sum(
        f1_p({"a": guesses(2 * seed, 60, 0.5)}, {"a": guesses(2 * seed + 1, 60, 0.5)}, seed, 200) <= 0.05
        for seed in range(200)
    )
    assert told / 200 < 0.1  # 5%, and three standard errors
