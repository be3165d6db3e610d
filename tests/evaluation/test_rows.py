import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fednl.errors import DataError
from fednl.evaluation.outcomes import Outcome, load_outcomes, save_outcomes
from fednl.evaluation.rows import CHANCE, leaks, result_rows
from fednl.evaluation.shares import mcnemar, wilson


def outcomes(right: dict[str, list[int]], nats: float = 1.0) -> list[Outcome]:
    return [
        Outcome(client, i, 2 if hit else 0, 2, bool(hit), bool(hit and i % 2), nats + i / 10, hit / 2, 4)
        for client, hits in right.items()
        for i, hit in enumerate(hits)
    ]


GOOD = outcomes({"a": [1] * 27 + [0] * 3, "b": [1] * 24 + [0] * 6}, nats=0.5)
POOR = [
    replace(one, nats_per_token=one.nats_per_token + (-1) ** one.index / 10)  # gaps that vary, 2 on average
    for one in outcomes({"a": [1] * 8 + [0] * 22, "b": [0] * 23 + [1] * 7}, nats=2.5)
]


def rows_where(rows: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def one(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (row,) = rows_where(rows, **wanted)
    return row


def made(**arms: list[Outcome]) -> list[dict[str, Any]]:
    named = {arm.replace("_", "-"): found for arm, found in arms.items()}
    return result_rows(named, seed=3, tokens=320, shared={"federated": ["write", "gate"]}, resamples=2000)


def test_a_clients_row_is_complete() -> None:
    low, high = wilson(27, 30)
    assert one(made(federated=GOOD), client="a", metric="candidates") == {
        "method": "federated",
        "client": "a",
        "metric": "candidates",
        "value": 0.9,
        "n": 30,
        "correct": 27,
        "low": low,
        "high": high,
        "chance": CHANCE,
        "shared": ["write", "gate"],
        "seed": 3,
        "tokens": 320,
    }


def test_what_does_not_apply_has_no_key() -> None:
    rows = made(federated=GOOD, window_only=POOR)
    assert "chance" not in one(rows, method="federated", client="a", metric="recall")
    assert not {"chance", "correct"} & set(one(rows, method="federated", client="a", metric="nats_per_token"))
    assert all("shared" not in row for row in rows_where(rows, method="window-only"))
    single = one(made(federated=outcomes({"a": [1]})), client="a", metric="nats_per_token")
    assert not {"low", "high"} & set(single)
    json.dumps(rows, allow_nan=False)
    assert None not in [value for row in rows for value in row.values()]


def test_the_macro_row_averages_clients_not_questions() -> None:
    uneven = outcomes({"a": [1] * 30, "b": [0] * 10})
    row = one(made(federated=uneven), client="macro", metric="candidates")
    assert row["value"] == 0.5
    assert (row["n"], row["correct"], row["clients"]) == (40, 30, 2)
    nats = one(made(federated=GOOD), client="macro", metric="nats_per_token")
    assert nats["value"] == pytest.approx(0.5 + sum(range(30)) / 300)
    assert nats["low"] < nats["value"] < nats["high"]


def test_differences_are_paired_and_say_better_or_worse() -> None:
    rows = made(federated=GOOD, window_only=POOR, state_zeroed=POOR)
    row = one(rows, metric="difference", baseline="window-only", of="candidates")
    assert row["value"] == pytest.approx((19 / 30 + 17 / 30) / 2)
    assert (row["method"], row["client"], row["n"], row["clients"]) == ("federated", "macro", 60, 2)
    assert row["verdict"] == "better"
    assert row["p"] == mcnemar([o.correct for o in GOOD], [o.correct for o in POOR])
    # A loss that falls is better, and has no right or wrong.
    nats = one(rows, metric="difference", baseline="window-only", of="nats_per_token")
    assert nats["value"] == pytest.approx(-2.0)
    assert nats["verdict"] == "better"
    assert "p" not in nats
    reverse = made(federated=POOR, window_only=GOOD)
    assert {row["verdict"] for row in rows_where(reverse, metric="difference")} == {"worse"}
    same = made(federated=GOOD, window_only=GOOD)
    assert one(same, metric="difference", of="candidates")["verdict"] == "no clear difference"


def test_a_few_wins_that_a_coin_would_give_are_no_clear_difference() -> None:
    # Five wins and no loss of thirty: the interval excludes zero, the exact test says p = 0.0625.
    rows = made(federated=outcomes({"a": [1] * 10 + [0] * 20}), window_only=outcomes({"a": [1] * 5 + [0] * 25}))
    row = one(rows, metric="difference", of="candidates")
    assert row["low"] > 0
    assert row["p"] == 0.0625
    assert row["verdict"] == "no clear difference"


def test_the_test_of_an_average_speaks_for_the_arm_whose_average_is_higher() -> None:
    """Eight wins of the small client's eight questions, thirty losses of the large one's two hundred.

    Over all questions the second arm is ahead, 30 to 8 with p = 0.0005, which is nothing for the average of the two.
    """
    ours = outcomes({"a": [1] * 8, "b": [1] * 100 + [0] * 100})
    theirs = outcomes({"a": [0] * 8, "b": [1] * 130 + [0] * 70})
    row = one(made(federated=ours, window_only=theirs), metric="difference", of="candidates")
    assert row["value"] == pytest.approx(0.425) and row["verdict"] == "better"
    # All eight coins of the small client fall alike, and those of the large one do not matter: 2 / 2^8.
    assert row["p"] == pytest.approx(2 / 2**8, rel=0.01)
    # Four wins of four are no proof, however many questions the other client has.
    few = outcomes({"a": [1] * 4, "b": [1] * 100 + [0] * 100}), outcomes({"a": [0] * 4, "b": [1] * 130 + [0] * 70})
    row = one(made(federated=few[0], window_only=few[1]), metric="difference", of="candidates")
    assert row["value"] > 0.4 and row["p"] > 0.05 and row["verdict"] == "no clear difference"


def test_macro_f1_is_judged_by_a_test_of_macro_f1() -> None:
    """An arm that always says the common class is as often right, and knows nothing of the rare ones."""
    golds = [0] * 160 + [1] * 20 + [2] * 20

    def answered(wrong: Callable[[int, int], bool], to: Callable[[int], int]) -> list[Outcome]:
        chosen = [to(gold) if wrong(i, gold) else gold for i, gold in enumerate(golds)]
        return [
            Outcome("a", i, c, gold, c == gold, False, 1.0, 0.0, 1)
            for i, (gold, c) in enumerate(zip(golds, chosen, strict=True))
        ]

    arms = {
        "federated": answered(lambda i, gold: i % 5 == 0, lambda gold: (gold + 1) % 3),
        "window-only": answered(lambda i, gold: gold > 0, lambda gold: 0),
    }
    rows = result_rows(arms, seed=0, tokens=9, metrics=("accuracy", "macro_f1"), resamples=500)
    accuracy, f1 = (one(rows, metric="difference", of=of) for of in ("accuracy", "macro_f1"))
    assert accuracy["value"] == 0.0 and accuracy["p"] > 0.9 and accuracy["verdict"] == "no clear difference"
    assert f1["low"] > 0.2 and f1["p"] < 0.01 and f1["verdict"] == "better"


def test_without_a_prompt_length_there_is_no_such_key() -> None:
    rows = result_rows({"federated": GOOD, "window-only": POOR, "local-only": GOOD}, seed=3, resamples=100)
    assert rows and not any("tokens" in row for row in rows)


def test_losses_that_do_not_vary_or_are_two_have_no_interval_and_no_verdict() -> None:
    for ours, theirs in (([1, 1, 1], [0, 0, 0]), ([1, 0], [0, 1])):
        arms = [[replace(o, nats_per_token=2.0 - o.correct) for o in outcomes({"a": own})] for own in (ours, theirs)]
        losses = [row for row in made(federated=arms[0], window_only=arms[1]) if "nats_per_token" in row.values()]
        assert len(losses) == 5 and not any({"low", "high", "verdict"} & row.keys() for row in losses)


def test_one_loss_a_client_has_no_interval_and_no_verdict() -> None:
    """Six gaps of -0.1 and one of +0.3 are seven numbers that never vary within a client: no certainty."""
    gaps = dict(zip("abcdefg", [-0.101] * 6 + [0.299], strict=True))
    ours = [replace(one, nats_per_token=1 + gaps[one.client]) for one in outcomes({name: [1] for name in gaps})]
    rows = made(federated=ours, **{"window-only": outcomes({name: [1] for name in gaps})})
    losses = [row for row in rows if "nats_per_token" in (row["metric"], row.get("of"))]
    assert any(row["metric"] == "difference" for row in losses)
    assert not any({"low", "high", "verdict"} & row.keys() for row in losses)


def test_pairing_is_by_question_not_by_order() -> None:
    forwards = made(federated=GOOD, window_only=POOR)
    backwards = made(federated=GOOD[::-1], window_only=POOR)
    key = str
    assert sorted(map(key, forwards)) == sorted(map(key, backwards))


def test_only_measured_arms_are_compared() -> None:
    rows = made(federated=GOOD, pooled=[], full_attention=GOOD)
    assert {row["baseline"] for row in rows_where(rows, metric="difference")} == {"full-attention"}
    assert not rows_where(rows, method="pooled")


def test_the_aggregation_drop_is_local_minus_federated_in_points() -> None:
    rows = made(federated=POOR, local_only=[o for o in GOOD if o.client == "a"])
    drop = one(rows, metric="aggregation_drop_pp", client="a")
    assert drop["value"] == pytest.approx(100 * 19 / 30)
    assert drop["low"] < drop["value"] < drop["high"]
    assert drop["n"] == 30
    # A held-out client has no rules of its own: it takes no part, and the macro says over how many questions.
    assert not rows_where(rows, metric="aggregation_drop_pp", client="b")
    assert one(rows, metric="aggregation_drop_pp", client="macro")["n"] == 30
    assert one(rows, metric="difference", baseline="local-only", of="candidates")["clients"] == 1


def test_arms_on_other_questions_are_refused() -> None:
    with pytest.raises(DataError, match='"federated" and "window-only"'):
        made(federated=GOOD, window_only=POOR[1:])
    with pytest.raises(DataError, match="twice"):
        made(federated=[*GOOD, GOOD[0]])


def test_a_leak_is_answering_above_chance_without_the_events() -> None:
    assert leaks(made(events_removed=GOOD))
    assert not leaks(made(events_removed=POOR))
    assert not leaks(made(federated=GOOD))


def test_letters_have_no_recall() -> None:
    rows = result_rows({"federated": GOOD}, seed=0, tokens=9, metrics=("candidates",), resamples=100)
    assert {row["metric"] for row in rows} == {"candidates"}


def test_outcomes_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    save_outcomes(path, {"federated": GOOD, "window-only": POOR})
    assert load_outcomes(path) == {"federated": GOOD, "window-only": POOR}
    first = json.loads(path.read_text().splitlines()[0])
    assert set(first) == {"arm", *Outcome.__dataclass_fields__}
    # Names and numbers only: nothing that was asked or answered.
    assert all(
        key in ("arm", "client", "task", "question") or isinstance(value, int | float) for key, value in first.items()
    )


@pytest.mark.parametrize("line", ["{", "[]", '{"arm": "a"}', '{"arm": "a", "client": "c", "index": 1}'])
def test_a_damaged_file_of_outcomes_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "outcomes.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match="line 1 is not an outcome"):
        load_outcomes(path)
