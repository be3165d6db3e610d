import itertools
import math
import operator
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, norm, t

from fednl.evaluation.shares import macro_mcnemar, mcnemar, wilson
from fednl.evaluation.statistics import (
    Difference,
    Interval,
    bootstrap_mean,
    has_spread,
    macro_difference,
    macro_mean,
    paired_bootstrap,
    told_ends,
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


ARMS = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=4)


@settings(deadline=None, max_examples=40)
@given(st.lists(ARMS, min_size=1, max_size=2))
def test_mcnemar_of_an_average_counts_every_fall_of_the_coins(clients: list[list[tuple[bool, bool]]]) -> None:
    steps = [Fraction(int(x) - int(y), len(pairs)) for pairs in clients for x, y in pairs if x != y]
    falls = [abs(sum(map(operator.mul, signs, steps))) for signs in itertools.product((1, -1), repeat=len(steps))]
    expected = sum(fall >= abs(sum(steps)) for fall in falls) / len(falls)
    a, b = ([[pair[arm] for pair in pairs] for pairs in clients] for arm in (0, 1))
    assert macro_mcnemar(a, b) == pytest.approx(expected, rel=1e-9)
    assert macro_mcnemar(b, a) == macro_mcnemar(a, b)


def test_mcnemar_of_an_average_is_mcnemars_where_clients_are_alike_and_stays_exact_where_weights_are_rounded() -> None:
    rng = np.random.default_rng(4)
    a, b = ([(rng.random(40) < rate).tolist() for _ in range(5)] for rate in (0.6, 0.4))
    assert macro_mcnemar(a, b) == mcnemar(*(list(itertools.chain(*arm)) for arm in (a, b)))
    assert macro_mcnemar([*a, []], [*b, []]) == macro_mcnemar(a, b)
    sizes = [101, 103, 107, 109, 113, 127]  # their least common multiple has thirteen digits
    told = 0
    for _ in range(100):
        x, y = ([(rng.random(n) < 0.5).tolist() for n in sizes] for _ in range(2))
        told += macro_mcnemar(x, y) <= 0.05
    assert told / 100 < 0.12  # 5%, and three standard errors
    with pytest.raises(ValueError):
        macro_mcnemar([[1]], [[1], [0]])


def test_mcnemar_is_exact_beyond_the_range_of_floats() -> None:
    assert mcnemar([1] * 3000, [0] * 3000) == 0.0
    assert mcnemar([1, 0] * 3000, [0, 1] * 3000) == 1.0
    with pytest.raises(ValueError):
        mcnemar([1], [1, 0])


def test_bootstrap_equals_the_exhaustive_bootstrap() -> None:
    values = [0.13, 1.07, 1.91, 2.2, 3.34, 4.51]
    every = sorted(sum(draw) / 6 for draw in itertools.product(values, repeat=6))
    mean = sum(values) / 6
    wider = math.sqrt(6 / 5) * t.ppf(0.975, 5) / norm.ppf(0.975)
    low, high = (mean + wider * (every[round(q * (len(every) - 1))] - mean) for q in (0.025, 0.975))
    ours = bootstrap_mean(values, seed=3, resamples=100_000)
    assert ours.value == pytest.approx(mean)
    assert ours.n == 6
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=0.03)


@pytest.mark.parametrize(("clients", "n"), [(1, 3), (1, 5), (1, 16), (7, 5)])
def test_losses_without_a_difference_are_seldom_told_apart(clients: int, n: int) -> None:
    # A percentile bootstrap without the two factors calls 24, 17, 7 and 12% of these better or worse.
    rng, told, trials = np.random.default_rng(0), 0, 400
    for trial in range(trials):
        a, b = ({str(client): rng.standard_normal(n).tolist() for client in range(clients)} for _ in range(2))
        told += macro_difference(a, b, seed=trial, resamples=500).verdict() != "no clear difference"
    assert told / trials < 0.085  # 5%, and three standard errors of 400 trials


RATES = {
    "half": [0.5] * 7,
    "high": [0.95] * 7,
    "unlike": [0.2, 0.3, 0.6, 0.9, 0.95, 1.0, 1.0],
}


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("n", [5, 15])
def test_an_average_of_shares_is_inside_its_interval_as_often_as_it_says(rates: list[float], n: int) -> None:
    rng, inside, trials = np.random.default_rng(1), 0, 1000
    for _ in range(trials):
        ours = macro_mean({str(c): (rng.random(n) < rate).tolist() for c, rate in enumerate(rates)}, 0, shares=True)
        inside += ours.low <= sum(rates) / 7 <= ours.high
    assert inside / trials > 0.925


@pytest.mark.parametrize(("first", "second", "both"), [(0.6, 0.6, 0.5), (0.5, 0.25, 0.2), (0.97, 0.95, 0.94)])
@pytest.mark.parametrize(("clients", "n"), [(7, 5), (7, 15), (1, 10)])
def test_a_paired_difference_of_shares_is_inside_its_interval_as_often_as_it_says(
    first: float, second: float, both: float, clients: int, n: int
) -> None:
    rng, inside, trials = np.random.default_rng(2), 0, 1000
    for _ in range(trials):
        drawn = rng.random((clients, n))
        a, b = drawn < first, (drawn < both) | ((drawn >= first) & (drawn < first + second - both))
        gap = macro_difference(
            {str(c): a[c].tolist() for c in range(clients)},
            {str(c): b[c].tolist() for c in range(clients)},
            0,
            shares=True,
        )
        inside += gap.low <= first - second <= gap.high
    assert inside / trials > 0.925


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
    # As shares, two right of two are not known to be right for ever.
    shares = macro_mean(values, seed=1, shares=True)
    assert shares.value == macro.value and shares.low < 0.45 and shares.high > 0.55


def test_the_interval_depends_on_the_seed_only() -> None:
    values = {"b": [0.0, 1.0, 1.0], "a": [1.0, 0.0, 0.0, 0.0]}
    again = macro_mean(dict(reversed(values.items())), seed=5)
    assert macro_mean(values, seed=5) == again
    assert macro_mean({**values, "none": []}, seed=5) == again
    normal = {name: [math.sin(7 * i + len(name)) for i in range(30)] for name in ("x", "yy")}
    assert macro_mean(normal, seed=5) != macro_mean(normal, seed=6)


def test_of_one_client_it_is_wilsons_interval() -> None:
    assert bootstrap_mean([1.0] * 7 + [0.0] * 13, seed=0, shares=True) == Interval(0.35, *wilson(7, 20), 20)
    # As many questions of as many alike clients are as good as one client's, in the middle.
    many = macro_mean({name: [1.0, 0.0] * 20 for name in "abc"}, 0, shares=True)
    assert (many.low, many.high) == pytest.approx(wilson(60, 120), abs=1e-12)


def test_perfect_scores_are_no_certainty_and_a_wrong_answer_lowers_both_ends() -> None:
    right = {name: [1.0] * 15 for name in "abcdefg"}
    ours = macro_mean(right, 0, shares=True)
    assert (ours.low, ours.high) == (pytest.approx(wilson(105, 105)[0], abs=2e-3), 1.0)
    one_wrong = macro_mean({**right, "a": [1.0] * 14 + [0.0]}, 0, shares=True)
    assert one_wrong.low < ours.low and one_wrong.value < one_wrong.high < 1.0
    assert bootstrap_mean([2.0] * 4, seed=0).low == 2.0


@pytest.mark.parametrize("outcomes", [[1.5], [-0.1], [float("nan")]])
def test_what_is_no_share_is_refused(outcomes: list[float]) -> None:
    with pytest.raises(ValueError, match=r"share|finite"):
        bootstrap_mean(outcomes, seed=0, shares=True)


def test_a_client_with_one_loss_gives_no_interval_to_any_average() -> None:
    assert not has_spread({"a": [0.1, 0.2, 0.5], "b": [0.3]})
    assert not has_spread({"a": [0.1, 0.2, 0.5], "b": [0.3, 0.1]})  # two are alike by chance too often
    assert has_spread({"a": [0.1, 0.2, 0.5], "b": [0.3, 0.1, 0.1], "c": []})
    assert not has_spread({})


def test_of_three_and_of_many_losses_the_average_is_inside_its_interval_nearly_as_often_as_it_says() -> None:
    """With two in place of three 87% are inside; what is missing to 95% is Welch's approximation (decision 0047)."""
    rng, inside, trials = np.random.default_rng(3), 0, 300
    for trial in range(trials):
        losses = {name: rng.standard_normal(n).tolist() for name, n in (("few", 3), ("many", 30))}
        ours = macro_mean(losses, seed=trial, resamples=400)
        inside += ours.low <= 0 <= ours.high
    assert inside / trials > 0.89


@pytest.mark.parametrize("losses", [[2.0, 3.0, 4.0], [2.0] * 5, [1 / 3, 2 / 7, 0.1, 5.0]])
def test_an_interval_without_a_width_is_none_and_carries_no_verdict(losses: list[float]) -> None:
    gap = paired_bootstrap(losses, [loss + 0.1 for loss in losses], seed=0)  # rounded otherwise at each loss
    assert gap.mean == pytest.approx(-0.1) and not gap.has_width
    assert gap.verdict(higher_is_better=False) == "no clear difference"
    assert told_ends(gap) == {} == told_ends(bootstrap_mean([2.0] * 4, seed=0))
    assert told_ends(Interval(0.0, -0.1, 0.1, 9)) == {"low": -0.1, "high": 0.1}
    assert told_ends(Interval(0.0, -0.1, 0.1, 9), {"a": [0.1] * 7, "b": [0.1, 0.2]}) == {}


def test_identical_arms_show_no_difference() -> None:
    answers = [0, 1, 1, 0, 1, 0, 0, 1] * 5
    same = paired_bootstrap(answers, answers, seed=0, shares=True)
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
    ours = bootstrap_mean([float(o) for o in outcomes], seed, resamples=300, shares=True)
    assert 0.0 <= ours.low <= ours.value <= ours.high <= 1.0


def test_importing_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, fednl.evaluation.statistics, fednl.evaluation.rows, fednl.evaluation.settings;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
