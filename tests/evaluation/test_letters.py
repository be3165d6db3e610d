"""Questions by letter: one forward pass, four logits; who knows, who is silent, who guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from fednl.data.mmlu import ChoiceExample, MmluSettings, build
from fednl.data.settings import DataSettings
from fednl.evaluation.scoring import score_candidates
from small_run import byte_tokenizer, tiny_backbone


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> list[ChoiceExample]:
    folder = tmp_path_factory.mktemp("questions")
    rows = [
        {"question": f"Which {n}?", "choices": [f"{n}{c}" for c in "wxyz"], "answer": n % 4, "subject": "anatomy"}
        for n in range(240)
    ]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "g.json").write_text('{"clients": {"one": ["anatomy"]}}')
    own = MmluSettings(source=str(folder / "q.jsonl"), groups=str(folder / "g.json"))
    data = DataSettings(task="mmlu", tokens=400, clients=1, train=200, validation=0, test=40)
    splits = build(data, byte_tokenizer(), 0, "letters", 0, own)["one"]
    return [*splits.test, *splits.train]


class Oracle(nn.Module):
    """A model whose last token's logits are what it is told, and which counts its passes."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.told, self.passes = logits, 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Any, **named: Any) -> Any:
        self.passes += 1
        rows = torch.stack([self.told(tuple(ids.tolist())) for ids in input_ids])[:, None]
        return type("Output", (), {"logits": rows})()


class NoCache:
    def batch_repeat_interleave(self, repeats: int) -> None:
        raise AssertionError("a letter needs no second pass")


def scores(examples: list[ChoiceExample], logits: Any, batch: int = 8) -> tuple[float, int]:
    model = Oracle(logits)
    found = score_candidates(model, examples, arm="oracle", make_cache=lambda model: NoCache(), batch=batch)
    return sum(one.correct for one in found) / len(found), model.passes


def at(ids: tuple[int, ...], value: float = 5.0) -> Tensor:
    logits = torch.zeros(258)
    logits[list(ids)] = value
    return logits


def test_who_knows_scores_everything_and_who_errs_nothing(examples: list[ChoiceExample]) -> None:
    gold = {one.prompt_ids: one.candidate_ids[one.gold] for one in examples}
    wrong = {one.prompt_ids: one.candidate_ids[(one.gold + 1) % 4] for one in examples}
    # With one token a byte, a letter is its space and itself: the space is every letter's, so only the letter tells.
    single = [one for one in examples if len(one.candidate_ids[0]) == 1]
    assert single == examples
    assert scores(examples, lambda ids: at(gold[ids]))[0] == 1.0
    assert scores(examples, lambda ids: at(wrong[ids]))[0] == 0.0


def test_who_knows_nothing_is_at_chance(examples: list[ChoiceExample]) -> None:
    # Ties are broken by a fixed permutation of the positions, which knows nothing of the answer: 240 questions.
    share, _ = scores(examples, lambda ids: torch.zeros(258))
    assert abs(share - 0.25) < 0.1
    chosen = score_candidates(
        Oracle(lambda ids: torch.zeros(258)), examples, arm="uniform", make_cache=lambda model: NoCache()
    )
    assert all(one.nats_per_token == pytest.approx(torch.tensor(258.0).log().item(), abs=1e-6) for one in chosen)
    # On every way of placing the right answer it is right exactly once in four.
    turned = [[type(one)(**{**vars(one), "gold": (one.gold + turn) % 4}) for one in examples] for turn in range(4)]
    assert sum(scores(some, lambda ids: torch.zeros(258))[0] for some in turned) == pytest.approx(1.0, abs=1e-12)


def test_a_batch_of_questions_is_one_pass(examples: list[ChoiceExample]) -> None:
    alike = [one for one in examples if len(one.prompt_ids) == len(examples[0].prompt_ids)][:8]
    assert scores(alike, lambda ids: torch.zeros(258), batch=8)[1] == 1
    assert scores(alike, lambda ids: torch.zeros(258), batch=1)[1] == len(alike)


def test_four_logits_of_one_pass_are_what_is_compared(examples: list[ChoiceExample], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_backbone(tmp_path / "m")).eval()
    found = {
        batch: score_candidates(
            model, examples[:8], arm="tiny", make_cache=lambda model: DynamicCache(config=model.config), batch=batch
        )
        for batch in (1, 4, 8)
    }
    for place, one in enumerate(examples[:8]):
        logits = model(torch.tensor([one.prompt_ids])).logits[0, -1]
        four = torch.stack([logits[ids[0]] for ids in one.candidate_ids])
        assert found[1][place].chosen == int(four.argmax())
        nats = (logits.logsumexp(0) - four[one.gold]).item()
        for batch in (1, 4, 8):
            assert found[batch][place].chosen == found[1][place].chosen
            assert found[batch][place].nats_per_token == pytest.approx(nats, abs=1e-5)
