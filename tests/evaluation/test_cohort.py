"""The worst client, the spread, and the thirds of a long tail."""

from __future__ import annotations

import pytest

from fednl.data.client_names import RESERVED
from fednl.evaluation.cohort import COHORT, cohort_rows
from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.rows import MACRO, result_rows
from fednl.report.cohort import cohort_table

CLIENTS = {"ada": [1.0, 1.0, 0.0, 1.0], "bob": [0.0, 0.0, 0.0, 1.0], "cyd": [1.0, 0.0, 1.0, 0.0]}
GROUPS = {"head": ["ada"], "middle": ["cyd"], "tail": ["bob", "held out"]}


def test_no_client_is_called_what_a_row_is_called() -> None:
    assert {MACRO, "pooled", *COHORT} <= RESERVED


@pytest.mark.parametrize(("higher_is_better", "worst", "value"), [(True, "bob", 0.25), (False, "ada", 0.75)])
def test_worst_and_spread_know_which_way_is_better(higher_is_better: bool, worst: str, value: float) -> None:
    rows = cohort_rows(CLIENTS, GROUPS, shares=higher_is_better, seed=0, resamples=100)
    by_name = {row["client"]: row for row in rows}
    assert (by_name["worst"]["of"], by_name["worst"]["value"], by_name["worst"]["n"]) == ([worst], value, 4)
    assert by_name["spread"]["value"] == pytest.approx(0.5)
    assert by_name["spread"]["n"] == 12
    assert (by_name["tail"]["of"], by_name["tail"]["value"]) == (["bob"], 0.25)
    assert "low" not in by_name["spread"]


def test_one_client_is_no_cohort() -> None:
    assert cohort_rows({"ada": [1.0]}, {}, shares=True, seed=0) == []


def test_results_hold_them_per_method_and_the_report_shows_them() -> None:
    outcomes = [
        Outcome(client, index, 0, 0, bool(hit), False, 1.0 + index, 0.0, 3)
        for client, hits in CLIENTS.items()
        for index, hit in enumerate(hits)
    ]
    rows = result_rows({"federated": outcomes, "local-only": outcomes}, seed=0, tokens=9, groups=GROUPS, resamples=50)
    found = [(row["method"], row["metric"], row["value"]) for row in rows if row["client"] == "tail"]
    assert ("local-only", "candidates", 0.25) in found and ("federated", "nats_per_token", 2.5) in found
    table = "\n".join(cohort_table(rows, "candidates"))
    assert "25.0 [" in table and "(bob)" in table and "head: ada; middle: cyd; tail: bob." in table
    assert cohort_table(rows, "recall") == []


def test_groups_may_be_of_kinds_of_data_that_run_across_clients() -> None:
    kinds = {0: "x", 1: "y", 2: "z", 3: "x"}
    outcomes = [
        Outcome(client, index, 0, 0, bool(hit), False, 1.0, 0.0, 3, kinds[index])
        for client, hits in CLIENTS.items()
        for index, hit in enumerate(hits)
    ]
    groups = {"head": ["x"], "middle": ["y"], "tail": ["z"]}
    rows = result_rows({"federated": outcomes}, seed=0, tokens=9, groups=groups, metrics=["candidates"], resamples=50)
    found = {row["client"]: (row["value"], row["n"]) for row in rows if row["client"] in groups}
    assert found == {"head": (4 / 6, 6), "middle": (1 / 3, 3), "tail": (1 / 3, 3)}
    assert next(row["of"] for row in rows if row["client"] == "worst") == ["bob"]
