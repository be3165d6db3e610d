from __future__ import annotations

import math
from typing import Any

import pytest
from scipy.stats import ttest_1samp

from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.rows import result_rows
from fednl.evaluation.seeds import TOO_FEW, mean_over_seeds, over_seeds, same_but_seed


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


def test_settings_are_compared_without_the_seed() -> None:
    config = {"format": 1, "run": {"seed": 3, "out": "x"}, "data": {"tokens": 320}}
    assert same_but_seed(config) == {"data": {"tokens": 320}}
