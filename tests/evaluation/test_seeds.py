from __future__ import annotations

import math
from typing import Any

import pytest
from scipy.stats import ttest_1samp

from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.rows import result_rows
from fednl.evaluation.seeds import NO_SPREAD, NOT_EVERYWHERE, TOO_FEW, mean_over_seeds, over_seeds, same_but_seed
from fednl.evaluation.streaming import StreamNats, streaming_rows


def rows(seed: int, value: float, of: str = "candidates", **changed: Any) -> list[dict[str, Any]]:
    row = {"method": "federated", "baseline": "window-only", "client": "macro", "metric": "difference", "of": of}
    return [row | {"seed": seed, "value": value} | changed]


def test_the_interval_is_students() -> None:
    values = {0: 0.12, 1: 0.05, 2: 0.19, 5: 0.08}
    interval = mean_over_seeds(values)
    expected = ttest_1samp(list(values.values()), 0.0).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx(tuple(expected), abs=1e-12)
    assert (interval.mean, interval.n) == (pytest.approx(0.11), 4)


@pytest.mark.parametrize("values", [{}, {0: 1.0}, {0: 1.0, 1: math.nan}])
def test_what_has_no_interval_is_refused(values: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="two or more"):
        mean_over_seeds(values)


def test_a_claim_takes_three_seeds_and_an_interval_without_zero() -> None:
    def verdict(*values: float, of: str = "candidates") -> str:
        return over_seeds([rows(seed, value, of) for seed, value in enumerate(values)])[0].verdict

    assert verdict(0.3) == verdict(0.3, 0.31) == TOO_FEW
    assert verdict(0.30, 0.31, 0.29) == "better"
    assert verdict(-0.30, -0.31, -0.29) == "worse"
    assert verdict(-0.30, -0.31, -0.29, of="nats_per_token") == "better"
    assert verdict(0.3, 0.0, 0.1) == "no clear difference"  # all on one side, and yet three seeds are few


def test_the_same_seed_twice_is_one_seed() -> None:
    assert over_seeds([rows(0, 0.3), rows(0, 0.3), rows(1, 0.3)])[0].verdict == TOO_FEW


def test_rows_of_the_evaluation_are_understood_and_others_left_out() -> None:
    def outcome(index: int, correct: bool) -> Outcome:
        return Outcome("a", index, 0, 0 if correct else 1, correct, False, 1.0, 0.0, 1)

    runs = [
        result_rows(
            {
                "federated": [outcome(i, True) for i in range(4)],
                "window-only": [outcome(i, True) for i in range(4)],
            },
            seed=seed,
            tokens=320,
            resamples=50,
        )
        for seed in (0, 1, 2)
    ]
    found = over_seeds(runs)
    assert {one.of for one in found} == {"candidates", "recall", "nats_per_token"}
    assert all(one.by_seed == {0: 0.0, 1: 0.0, 2: 0.0} and one.verdict == "no clear difference" for one in found)
    assert over_seeds([rows(0, 0.1, client="passkey")]) == []


def test_what_does_not_count_at_one_seed_counts_at_none() -> None:
    """Three seeds of a clear gap, at one of which the other arm was outside its range."""
    runs = [rows(seed, 0.7 + seed / 100, client="macro") for seed in range(3)]
    runs[1][0] |= {"note": "outside trained range", "verdict": "outside trained range, does not count"}
    (found,) = over_seeds(runs)
    assert (found.verdict, found.interval) == ("outside trained range, does not count", None)
    assert found.by_seed == {0: 0.7, 1: pytest.approx(0.71), 2: pytest.approx(0.72)}


def test_the_way_that_is_closed_has_a_mean_where_it_is_there_at_every_seed() -> None:
    def closed(seed: int, **told: Any) -> list[dict[str, Any]]:
        row = {"method": "FedNL", "client": "macro", "metric": "share_closed", "of": "candidates", "seed": seed}
        return [row | {"floor": "window", "ceiling": "full"} | told]

    (found,) = over_seeds([closed(seed, value=0.7 + seed / 10, n=105) for seed in range(3)])
    assert (found.metric, found.baseline, found.verdict) == ("share_closed", "window to full", "")
    assert found.interval is not None and found.interval.mean == pytest.approx(0.8)
    (found,) = over_seeds([closed(0, value=0.7, n=105), closed(1, value=0.8, n=105), closed(2)])
    assert (found.interval, found.verdict) == (None, NOT_EVERYWHERE)  # the others alone would be a choice
    (found,) = over_seeds([closed(0, value=0.7, n=105), closed(1, why="the ceiling is worse than the floor")])
    assert found.verdict == f"{NOT_EVERYWHERE}, as the ceiling is worse than the floor"
    (found,) = over_seeds([closed(seed, note="asked other prompts") for seed in range(3)])
    assert (found.interval, found.verdict, found.by_seed) == (None, "asked other prompts, does not count", {})


@pytest.mark.parametrize(("gap", "verdict"), [(1 / 35, NO_SPREAD), (-1 / 35, NO_SPREAD), (0.0, "no clear difference")])
def test_seeds_that_do_not_vary_carry_no_claim(gap: float, verdict: str) -> None:
    # 0.1 + gap - 0.1 is the same number to a person, and another one in its last digits.
    (found,) = over_seeds([rows(seed, (seed / 10 + gap) - seed / 10) for seed in range(3)])
    assert found.verdict == verdict and found.interval is not None and not found.interval.has_width


def test_bins_of_a_text_are_compared_each_by_itself() -> None:
    def read(seed: int) -> list[dict[str, Any]]:
        arms = {
            arm: [
                StreamNats((3.0, level + 0.1 * text + 0.01 * text * seed), (9, 10), (1, 1), (1, 1)) for text in range(4)
            ]
            for arm, level in (("federated", 2.0 + seed / 100), ("window-only", 2.5))
        }
        return streaming_rows(arms, seed=seed, bin_tokens=10)

    found = {one.from_token: one for one in over_seeds([read(seed) for seed in range(3)])}
    assert list(found) == [0, 10]
    assert found[0].verdict == "no clear difference" and found[10].verdict == "better"
    assert found[10].by_seed == {seed: pytest.approx(-0.5 + seed / 100) for seed in range(3)}


def test_settings_are_compared_without_the_seed() -> None:
    config = {"format": 1, "run": {"seed": 3, "out": "x"}, "data": {"tokens": 320}}
    assert same_but_seed(config) == {"data": {"tokens": 320}}
    faster = {"backbone": {"device": "cuda"}, "federation": {"parallel-clients": 4}, "evaluation": {"batch": 9}}
    assert same_but_seed(config | faster) == same_but_seed(config)
    assert same_but_seed(config | {"evaluation": {"answer": "letters"}}) != same_but_seed(config)
