from typing import get_args

import pytest
from pydantic import ValidationError

from fednl.evaluation.settings import ARMS, Arm, EvaluationSettings


def test_the_default_and_every_arm_have_words() -> None:
    assert set(EvaluationSettings().arms) <= set(ARMS)
    assert set(ARMS) == set(get_args(Arm))


def test_a_toml_array_is_taken_and_written_back() -> None:
    settings = EvaluationSettings.model_validate({"arms": ["federated", "window-only"], "batch": 4})
    assert settings.arms == ("federated", "window-only")
    assert settings.model_dump(mode="json", by_alias=True)["arms"] == ["federated", "window-only"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"arms": ["federated", "federated"]},
        {"arms": ["full attention"]},
        {"arms": "federated"},
        {"answer": "essay"},
        {"batch": 0},
        {"batch": "8"},
        {"batches": 8},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        EvaluationSettings.model_validate(wrong)
