import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import binomtest, norm

from fednl.evaluation.statistics import (
    Difference,
    bootstrap_mean,
    has_spread,
    macro_difference,
    macro_mean,
    mcnemar,
    paired_bootstrap,
    wilson,
)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 400), share=st.floats(0, 1), level=st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_wilson_equals_scipy(n: int, share: float, level: float) -> None:
    correct = round(share * n)
    theirs = binomtest(correct, n).proportion_ci(confidence_level=level, method="wilson")
    assert wilson(correct, n, level) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_wilson_known_value() -> None:
    # Newcombe 1998, Stat. Med. 17:857, table I: 81 of 263 gives 0.2553 to 0.3662.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 15)[0] == 0.0
    assert wilson(15, 15)[1] == 1.0
    assert wilson(0, 15)[1] > 0.2


@pytest.mark.parametrize(("correct", "n"), [(0, 0), (3, 2), (-1, 5)])
def test_wilson_refuses_impossible_counts(correct: int, n: int) -> None:
    with pytest.raises(ValueError, match="proportion"):
        wilson(correct, n)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=80))
def test_mcnemar_equals_the_binomial_test(pairs: list[tuple[bool, bool]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    first = sum(x > y for x, y in pairs)
    discordant = sum(x != y for x, y in pairs)
    expected = binomtest(first, discordant).pvalue if discordant else 1.0
    assert mcnemar(a, b) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(a, b) == mcnemar(b, a)


def test_mcnemar_is_exact_beyond_the_range_of_floats() -> None:
    assert mcnemar([1] * 3000, [0] * 3000) == 0.0
    assert mcnemar([1, 0] * 3000, [0, 1] * 3000) == 1.0
    with pytest.raises(ValueError):
        mcnemar([1], [1, 0])


def test_bootstrap_equals_the_exhaustive_bootstrap() -> None:
    values = [0.13, 1.07, 1.91, 2.2, 3.34, 4.51]
    every = sorted(sum(draw) / 6 for draw in itertools.product(values, repeat=6))
    low, high = (every[round(q * (len(every) - 1))] for q in (0.025, 0.975))
    ours = bootstrap_mean(values, seed=3, resamples=100_000)
    assert ours.value == pytest.approx(sum(values) / 6)
    assert ours.n == 6
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=0.02)


def test_bootstrap_nears_the_normal_interval_for_many_outcomes() -> None:
    values = [math.sin(i) for i in range(2000)]
    mean = sum(values) / 2000
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / 2000 / 2000) * norm.ppf(0.975)
    ours = bootstrap_mean(values, seed=0, resamples=4000)
    assert (ours.low, ours.high) == pytest.approx((mean - spread, mean + spread), rel=0.08)


def test_macro_counts_each_client_once_and_resamples_within_it() -> None:
    values = {"small": [1.0] * 2, "large": [0.0] * 198, "mixed": [0.0, 1.0] * 50}
    macro = macro_mean(values, seed=1)
    assert macro.value == pytest.approx((1 + 0 + 0.5) / 3)
    assert macro.n == 300
    # Only `mixed` has any spread: a bootstrap that pooled clients would be much wider.
    spread = norm.ppf(0.975) * math.sqrt(0.25 / 100) / 3
    assert (macro.low, macro.high) == pytest.approx((0.5 - spread, 0.5 + spread), abs=0.006)


def test_the_interval_depends_on_the_seed_only() -> None:
    values = {"b": [0.0, 1.0, 1.0], "a": [1.0, 0.0, 0.0, 0.0]}
    again = macro_mean(dict(reversed(values.items())), seed=5)
    assert macro_mean(values, seed=5) == again
    assert macro_mean({**values, "none": []}, seed=5) == again
    normal = {name: [math.sin(7 * i + len(name)) for i in range(30)] for name in ("x", "yy")}
    assert macro_mean(normal, seed=5) != macro_mean(normal, seed=6)


def test_perfect_scores_are_no_certainty() -> None:
    ours = macro_mean({"a": [1.0] * 30, "b": [1.0] * 30}, seed=0, bounds=(0.0, 1.0))
    exact = binomtest(60, 60).proportion_ci(method="exact")
    assert (ours.low, ours.high) == pytest.approx((exact.low, 1.0))
    assert bootstrap_mean([2.0] * 4, seed=0).low == 2.0


@pytest.mark.parametrize(
    "clients",
    [{"a": (1, 5), "b": (0, 5)}, {"a": (1, 30), "b": (1, 5)}, {"a": (1, 4), "b": (0, 9), "c": (0, 6)}],
)
def test_the_widened_interval_reaches_the_farthest_shares_that_could_still_look_like_this(
    clients: dict[str, tuple[int, int]],
) -> None:
    """Against a search over the shares of outcomes that were not seen, client by client."""
    ours = macro_mean({name: [float(value)] * n for name, (value, n) in clients.items()}, 0, bounds=(0.0, 1.0))
    sizes = np.array([n for _, n in clients.values()])

    def farthest(weights: NDArray[np.float64]) -> float:
        found = minimize(
            lambda shares: -float(weights @ shares),
            np.full(len(sizes), 0.01),
            bounds=[(0.0, 0.999)] * len(sizes),
            constraints={"type": "ineq", "fun": lambda s: float(sizes @ np.log1p(-s)) - math.log(0.025)},
        )
        return -float(found.fun) / len(sizes)

    right = np.array([float(value) for value, _ in clients.values()])
    assert ours.high == pytest.approx(right.mean() + farthest(1 - right), abs=1e-5)
    assert ours.low == pytest.approx(right.mean() - farthest(right), abs=1e-5)


def test_a_client_with_one_loss_gives_no_interval_to_any_average() -> None:
    assert not has_spread({"a": [0.1, 0.2], "b": [0.3]})
    assert has_spread({"a": [0.1, 0.2], "b": [0.3, 0.1], "c": []})
    assert not has_spread({})


def test_identical_arms_show_no_difference() -> None:
    answers = [0, 1, 1, 0, 1, 0, 0, 1] * 5
    same = paired_bootstrap(answers, answers, seed=0, bounds=(-1.0, 1.0))
    assert same.mean == 0.0
    assert same.low < 0.0 < same.high
    assert same.high < 0.1
    assert same.verdict() == "no clear difference"


def test_a_known_gap_is_found_and_pairing_narrows_it() -> None:
    # 300 questions; b is right on 60% of them, a on the same ones and on 10% more.
    b = [int(i % 10 < 6) for i in range(300)]
    a = [int(i % 10 < 7) for i in range(300)]
    gap = paired_bootstrap(a, b, seed=2)
    half = norm.ppf(0.975) * math.sqrt(0.1 * 0.9 / 300)
    assert gap.mean == pytest.approx(0.1)
    assert (gap.low, gap.high) == pytest.approx((0.1 - half, 0.1 + half), abs=0.01)
    assert gap.verdict() == "better"
    assert paired_bootstrap(b, a, seed=2).verdict() == "worse"
    unpaired = math.sqrt((0.7 * 0.3 + 0.6 * 0.4) / 300) * norm.ppf(0.975)
    assert gap.high - gap.low < 1.2 * unpaired


def test_macro_difference_is_the_mean_of_the_clients_differences() -> None:
    a = {"x": [1, 1, 1, 0], "y": [0, 0]}
    b = {"x": [0, 1, 0, 0], "y": [1, 0]}
    gap = macro_difference(a, b, seed=0)
    assert gap.mean == pytest.approx((0.5 - 0.5) / 2)
    assert gap.n == 6


def test_the_verdict_needs_an_interval_without_zero() -> None:
    assert Difference(0.1, 0.0, 0.2, 9).verdict() == "no clear difference"
    assert Difference(0.1, 0.01, 0.2, 9).verdict() == "better"
    assert Difference(0.1, 0.01, 0.2, 9).verdict(higher_is_better=False) == "worse"
    assert Difference(-0.1, -0.2, -0.01, 9).verdict(higher_is_better=False) == "better"


def test_unusable_outcomes_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        bootstrap_mean([1.0, float("nan")], seed=0)
    with pytest.raises(ValueError, match="at least one"):
        macro_mean({"a": []}, seed=0)
    with pytest.raises(ValueError, match="same clients"):
        macro_difference({"a": [1]}, {"b": [1]}, seed=0)
    with pytest.raises(ValueError):
        macro_difference({"a": [1, 0]}, {"a": [1]}, seed=0)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 2**40))
def test_the_interval_holds_its_mean_and_stays_in_bounds(outcomes: list[bool], seed: int) -> None:
    ours = bootstrap_mean([float(o) for o in outcomes], seed, resamples=300, bounds=(0.0, 1.0))
    assert 0.0 <= ours.low <= ours.value <= ours.high <= 1.0


def test_importing_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, fednl.evaluation.statistics, fednl.evaluation.rows, fednl.evaluation.settings;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
