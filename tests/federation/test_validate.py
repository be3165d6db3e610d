from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fednl.errors import MessageError
from fednl.federation.message import Message
from fednl.federation.validate import CODES, MOST_EXAMPLES, check_update

EXPECTED = {"a": torch.zeros(2), "b": torch.zeros(())}
GOOD = Message({"a": torch.ones(2), "b": torch.ones(())}, num_examples=3, round=2, client="ada", run="r")


def judge(message: Message, **named: Any) -> str:
    try:
        check_update(message, EXPECTED, 2, "ada", run="r", **named)
    except MessageError as error:
        return error.code
    return "ok"


def test_good_updates_pass() -> None:
    assert judge(GOOD) == "ok"
    assert judge(replace(GOOD, num_examples=0, status="empty")) == "ok"
    assert judge(replace(GOOD, num_examples=MOST_EXAMPLES)) == "ok"
    assert judge(replace(GOOD, extra={"c": torch.ones(1)}), expected_extra={"c": torch.zeros(1)}) == "ok"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"client": "bob"}, "unknown-client"),
        ({"round": 1}, "stale-round"),
        ({"round": 3}, "stale-round"),
        ({"run": "another"}, "stale-round"),
        ({"num_examples": -1}, "num-examples"),
        ({"num_examples": -200}, "num-examples"),
        ({"num_examples": 10**15}, "num-examples"),
        ({"num_examples": 1e15}, "num-examples"),
        ({"num_examples": 3.0}, "num-examples"),
        ({"num_examples": True}, "num-examples"),
        ({"num_examples": "3"}, "num-examples"),
        ({"num_examples": None}, "num-examples"),
        ({"params": {**GOOD.params, "private": torch.ones(1)}}, "unknown-name"),
        ({"params": {"a": torch.ones(2)}}, "missing-name"),
        ({"params": {}}, "missing-name"),
        ({"params": {**GOOD.params, "a": torch.ones(1, 2)}}, "shape"),
        ({"params": {**GOOD.params, "a": torch.ones(2, dtype=torch.float64)}}, "dtype"),
        ({"params": {**GOOD.params, "a": torch.ones(2, dtype=torch.int32)}}, "dtype"),
        ({"params": {**GOOD.params, "a": torch.tensor([1.0, float("nan")])}}, "non-finite"),
        ({"params": {**GOOD.params, "b": torch.tensor(float("inf"))}}, "non-finite"),
        ({"params": {**GOOD.params, "b": torch.tensor(float("-inf"))}}, "non-finite"),
        ({"extra": {"c": torch.ones(1)}}, "unknown-name"),
    ],
)
def test_bad_updates_are_refused_by_code(change: dict[str, Any], code: str) -> None:
    assert code in CODES
    assert judge(replace(GOOD, **change)) == code


def test_extras_are_checked_like_params() -> None:
    spec = {"c": torch.zeros(1)}
    assert judge(GOOD, expected_extra=spec) == "missing-name"
    assert judge(replace(GOOD, extra={"c": torch.tensor([float("nan")])}), expected_extra=spec) == "non-finite"


def test_a_refusal_repeats_nothing_that_the_client_wrote() -> None:
    for change in (
        {"params": {**GOOD.params, "secret": torch.ones(1)}},
        {"client": "secret"},
        {"run": "secret"},
    ):
        with pytest.raises(MessageError) as caught:
            check_update(replace(GOOD, **change), EXPECTED, 2, "ada", run="r")
        assert "secret" not in str(caught.value)
