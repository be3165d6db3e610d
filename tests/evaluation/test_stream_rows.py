"""Forgetting and backward transfer against numbers worked out by hand."""

from __future__ import annotations

import pytest

from fednl.errors import DataError
from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.stream import stream_rows

ORDERS = {"ada": ("x", "y", "z"), "bob": ("y", "z", "x")}


def answers(client: str, right: dict[str, list[int]]) -> list[Outcome]:
    """Outcomes by task; a question's number says where in the client's split it stands, as in a run."""
    found = []
    for place, task in enumerate(ORDERS[client]):
        for index, hit in enumerate(right.get(task, [])):
            loss = 1.0 - 0.5 * hit
            found.append(Outcome(client, 4 * place + index, 0, 0, bool(hit), False, loss, 0.0, 3, task))
    return found


AFTERS = [
    [*answers("ada", {"x": [1, 1, 0, 0]}), *answers("bob", {"y": [1, 1, 1, 0]})],
    [
        *answers("ada", {"x": [1, 1, 1, 0], "y": [1, 0, 0, 0]}),
        *answers("bob", {"y": [1, 1, 1, 1], "z": [1, 1, 0, 0]}),
    ],
    [
        *answers("ada", {"x": [1, 0, 0, 0], "y": [1, 1, 0, 0], "z": [1, 1, 1, 1]}),
        *answers("bob", {"y": [0, 0, 0, 0], "z": [1, 1, 0, 0], "x": [1, 1, 1, 1]}),
    ],
]


def test_the_table_of_every_task_after_every_task_is_over_places_in_each_clients_own_order() -> None:
    rows = stream_rows({"federated": AFTERS}, ORDERS, seed=0, tokens=320, resamples=200)
    cells = {(row["after"], row["task"]): row for row in rows if row["metric"] == "candidates"}
    assert {place: row["value"] for place, row in cells.items()} == {
        (1, 1): 5 / 8, (2, 1): 7 / 8, (2, 2): 3 / 8, (3, 1): 1 / 8, (3, 2): 4 / 8, (3, 3): 1.0
    }  # fmt: skip
    assert all(row["n"] == 8 and row["clients"] == 2 and row["chance"] == 0.25 for row in cells.values())
    assert cells[2, 1]["correct"] == 7
    assert all(row["low"] <= row["value"] <= row["high"] for row in cells.values())


def test_forgetting_and_backward_transfer_are_the_published_means_in_either_direction() -> None:
    rows = stream_rows({"federated": AFTERS}, ORDERS, seed=0, tokens=320, resamples=200)
    summary = {(row["metric"], row["of"]): row for row in rows if "of" in row}
    # Task 1: best 7/8 (after the second task), now 1/8; task 2: best 3/8, now 4/8.
    assert summary["forgetting", "candidates"]["value"] == pytest.approx((6 / 8 - 1 / 8) / 2)
    # Task 1: 1/8 now, 5/8 just after it; task 2: 4/8 now, 3/8 just after it.
    assert summary["backward_transfer", "candidates"]["value"] == pytest.approx((-4 / 8 + 1 / 8) / 2)
    # A loss is 1 - hit / 2, so everything is half as much and the other way round.
    assert summary["forgetting", "nats_per_token"]["value"] == pytest.approx((6 / 8 - 1 / 8) / 4)
    assert summary["backward_transfer", "nats_per_token"]["value"] == pytest.approx((4 / 8 - 1 / 8) / 4)
    assert all(row["n"] == 16 and row["low"] <= row["value"] <= row["high"] for row in summary.values())


def test_other_questions_after_another_task_are_refused() -> None:
    missing = [AFTERS[0], AFTERS[1], [one for one in AFTERS[2] if (one.client, one.index) != ("ada", 1)]]
    with pytest.raises(DataError, match='arm "federated" was asked other questions of client "ada" after 3 tasks'):
        stream_rows({"federated": missing}, ORDERS, seed=0, tokens=320, resamples=10)
