"""The needle task with the tokenizer it is meant for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fednl.data.needles import build
from fednl.data.public import build_public
from fednl.data.settings import DataSettings
from fednl.errors import SettingsError
from fednl.models.packaged import packaged_folder

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def smollm2() -> Any:
    from transformers import AutoTokenizer

    folder: Path = packaged_folder("smollm2-135m", "float32")
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(("tokens", "window_tokens"), [(320, 64), (192, 40)])
def test_seven_clients_fit_the_shipped_budgets(smollm2: Any, tokens: int, window_tokens: int) -> None:
    settings = DataSettings(tokens=tokens, train=20, validation=30, test=30)
    built = build(settings, smollm2, window_tokens, "candidates", 0)
    for splits in built.values():
        for one in (*splits.train, *splits.validation, *splits.test):
            question = one.prompt_ids[one.question_start :]
            assert 10 <= len(question) <= 22
            assert len(one.prompt_ids) == tokens
            assert one.events[-1].end <= tokens - window_tokens
            # The pieces are the tokens that the whole text would have.
            for text, ids in zip(one.candidates, one.candidate_ids, strict=True):
                whole = smollm2(f"{smollm2.decode(question)} {text}", add_special_tokens=False)["input_ids"]
                assert tuple(whole) == (*question, *ids)
    assert len(build_public(smollm2, 50, tokens, window_tokens, 0)) == 50


def test_letters_do_not_fit_a_window_of_64(smollm2: Any) -> None:
    with pytest.raises(SettingsError, match=r"memory\.window-tokens is 64 .* options"):
        build(DataSettings(train=5), smollm2, 64, "letters", 0)
