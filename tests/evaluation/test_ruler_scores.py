from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fednl.data.ruler import RULER_TASKS, RulerExample, build_ruler
from fednl.evaluation.ruler import answer_ruler, match_all, ruler_rows
from fednl.memory import MemoryCache, MemoryConfig, attach_memory
from small_run import byte_tokenizer, tiny_backbone


@pytest.mark.parametrize(
    ("answer", "wanted", "share"),
    [
        (" 1234567.", ["1234567"], 1.0),
        ("7654321, and 1234567", ["1234567", "7654321", "1111111", "2222222"], 0.5),
        ("ADA and bob", ["ada", "BOB"], 1.0),
        ("", ["x"], 0.0),
        ("nothing\x00of it", ["nothingof"], 0.0),
        ("12345678", ["1234567"], 1.0),  # as RULER counts: a text inside a longer one is found
    ],
)
def test_shares_of_wanted_texts(answer: str, wanted: list[str], share: float) -> None:
    assert match_all(answer, wanted) == share


class Speaker(nn.Module):
    """Says what it is told to, whatever it reads."""

    def __init__(self, say: Callable[[str], str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.say, self.tokenizer = say, byte_tokenizer()

    def generate(self, ids: Tensor, **named: Any) -> Tensor:
        said = self.tokenizer(self.say(self.tokenizer.decode(ids[0])), add_special_tokens=False)["input_ids"]
        assert named["do_sample"] is False and named["attention_mask"].shape == ids.shape
        return torch.cat([ids, torch.tensor([said[: named["max_new_tokens"]]], dtype=torch.long)], dim=1)


@pytest.fixture(scope="module")
def examples() -> list[RulerExample]:
    return [example for name in RULER_TASKS for example in build_ruler(name, 2, 7000, byte_tokenizer(), 0)]


def test_who_knows_the_answers_scores_everything_and_who_is_silent_nothing(examples: list[RulerExample]) -> None:
    known = {example.prompt: " ".join(example.answers) for example in examples}
    for say, expected in ((known.__getitem__, 1.0), (lambda prompt: "", 0.0)):
        done: list[int] = []
        answers = answer_ruler(Speaker(say), byte_tokenizer(), examples, on_scored=done.append)
        assert [answer.share for answer in answers] == [expected] * len(examples)
        assert done == list(range(1, len(examples) + 1))
        rows = ruler_rows({"federated": answers}, seed=0, tokens=7000)
        assert [row["client"] for row in rows] == [*RULER_TASKS, "macro"]
        assert all(row["value"] == expected and row["n"] == (22 if row["client"] == "macro" else 2) for row in rows)
        # Two answers alike are no certainty.
        assert all(row["low"] < 1.0 and row["high"] > 0.0 for row in rows)


def test_half_of_the_answers_are_half_of_the_score(examples: list[RulerExample]) -> None:
    asked = [example for example in examples if example.task == "niah_multivalue"]
    known = {example.prompt: " and ".join(example.answers[:2]) for example in asked}
    answers = answer_ruler(Speaker(known.__getitem__), byte_tokenizer(), asked)
    assert [answer.share for answer in answers] == [0.5, 0.5]


def test_a_model_with_memory_answers_from_the_cache_it_is_given(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_backbone(tmp_path / "m"))
    attach_memory(model, MemoryConfig(layers="last:1", rank=2, window_tokens=32, sink_tokens=2))
    tokenizer = byte_tokenizer()
    example = build_ruler("niah_single_1", 1, 700, tokenizer, 0)[0]
    said = []

    def make_cache(model: Any) -> MemoryCache:
        said.append(MemoryCache(model))
        return said[-1]

    answers = [answer_ruler(model, tokenizer, [example], make_cache=make)[0] for make in (make_cache, None)]
    assert answers[0] == answers[1]
    assert said[0].seen_tokens >= len(example.prompt_ids)
