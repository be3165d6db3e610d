import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from fednl.errors import FednlError, SettingsError
from fednl.evaluation.scoring import score_candidates, tie_order

VOCAB = 61


@dataclass(frozen=True)
class Asked:
    client: str
    index: int
    prompt_ids: tuple[int, ...]
    removed_ids: tuple[int, ...]
    question_start: int
    candidate_ids: tuple[tuple[int, ...], ...]
    gold: int


def ask(index: int, length: int = 20, client: str = "c", widths: Sequence[int] = (3, 1, 5, 2)) -> Asked:
    rng = torch.Generator().manual_seed(1000 * length + index)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB, (count,), generator=rng).tolist())

    return Asked(client, index, ids(length), ids(length), length - 4 - index % 3, tuple(map(ids, widths)), index % 4)


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def dynamic(model: nn.Module) -> DynamicCache:
    return DynamicCache(config=model.config)


class TokensCache:
    """Remembers each row's real tokens, and those since the state was last reset."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.forgotten = 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows = [list(row) for row in self.rows for _ in range(repeats)]

    def reset_state(self) -> None:
        self.forgotten = len(self.rows[0]) if self.rows else 0


class FunctionModel(nn.Module):
    """A causal language model given as a function of the tokens it remembers; keeps the calls it got."""

    def __init__(self, function: Callable[[tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self.function = function
        self.calls: list[tuple[int, int, int]] = []

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        past_key_values: TokensCache,
        use_cache: bool,
        logits_to_keep: int = 0,
    ) -> Any:
        assert use_cache
        assert not torch.is_grad_enabled()
        assert not self.training
        batch, new = input_ids.shape
        cache = past_key_values
        cache.rows = cache.rows or [[] for _ in range(batch)]
        assert attention_mask.shape == (batch, len(cache.rows[0]) + new)
        self.calls.append((batch, new, logits_to_keep))
        logits = torch.zeros(batch, new, VOCAB)
        for row, tokens, mask in zip(range(batch), input_ids.tolist(), attention_mask[:, -new:], strict=True):
            for place, token in enumerate(tokens):
                cache.rows[row].append(token)
                if mask[place]:
                    logits[row, place] = self.function(tuple(cache.rows[row][cache.forgotten :]))
        return SimpleNamespace(logits=logits[:, -logits_to_keep:] if logits_to_keep else logits)


def function_score(function: Callable[[tuple[int, ...]], Tensor], asked: Sequence[Asked], **named: Any) -> Any:
    model = FunctionModel(function)
    return model, score_candidates(
        model, asked, arm="toy", make_cache=lambda _: TokensCache(), **({"batch": 4} | named)
    )


def by_hand(model: nn.Module, prompt: Sequence[int], continuation: Sequence[int]) -> tuple[float, list[bool]]:
    """Mean log probability and hits of a continuation, from one whole pass in float64, no cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *continuation]])).logits[0].double()
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    wanted = torch.tensor(continuation)
    return float(rows[range(len(wanted)), wanted].mean()), (rows.argmax(-1) == wanted).tolist()


def greedy(model: nn.Module, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def test_scores_equal_a_whole_pass_without_cache() -> None:
    model = tiny_llama()
    asked = [ask(i) for i in range(6)]
    for example, outcome in zip(
        asked, score_candidates(model, asked, arm="a", make_cache=dynamic, batch=4), strict=True
    ):
        scores = [by_hand(model, example.prompt_ids, ids)[0] for ids in example.candidate_ids]
        hits = by_hand(model, example.prompt_ids, example.candidate_ids[example.gold])[1]
        assert (outcome.client, outcome.index, outcome.gold) == ("c", example.index, example.gold)
        assert outcome.chosen == max(range(4), key=scores.__getitem__)
        assert outcome.correct == (outcome.chosen == example.gold)
        assert outcome.nats_per_token == pytest.approx(-scores[example.gold], abs=1e-5)
        assert outcome.logprob_gold == -outcome.nats_per_token
        assert outcome.token_accuracy == sum(hits) / len(hits)
        assert outcome.gold_tokens == len(example.candidate_ids[example.gold])


def test_results_do_not_depend_on_batch_pieces_or_neighbours() -> None:
    model = tiny_llama(1)
    # Unequal prompts between the others: each must land in its own row again.
    asked = [ask(i, length=20 + 7 * (i % 2)) for i in range(13)]
    first = score_candidates(model, asked, arm="a", make_cache=dynamic, batch=1)
    for batch, pieces in [(4, 2048), (8, 2048), (8, 6), (3, 1)]:
        again = score_candidates(model, asked, arm="a", make_cache=dynamic, batch=batch, piece_tokens=pieces)
        for one, other in zip(first, again, strict=True):
            assert other.nats_per_token == pytest.approx(one.nats_per_token, abs=2e-5)
            assert replace(other, nats_per_token=one.nats_per_token) == one


def test_recall_equals_greedy_generation() -> None:
    found = Counter()
    for seed in range(4):
        model = tiny_llama(10 + seed)
        asked = []
        for i in range(12):
            example = ask(i, widths=(4, 4, 4, 4))
            answer = greedy(model, example.prompt_ids, 4)
            # A third greedy's own answer, a third that answer with one token changed, a third anything.
            wrong = (*answer[: i % 4], (answer[i % 4] + 1) % VOCAB, *answer[i % 4 + 1 :])
            gold = (answer, wrong, example.candidate_ids[example.gold])[i % 3]
            candidates = list(example.candidate_ids)
            candidates[example.gold] = gold
            asked.append(replace(example, candidate_ids=tuple(candidates)))
        outcomes = score_candidates(model, asked, arm="a", make_cache=dynamic, batch=5)
        for example, outcome in zip(asked, outcomes, strict=True):
            reproduced = greedy(model, example.prompt_ids, 4) == example.candidate_ids[example.gold]
            assert outcome.recall == reproduced
            assert (outcome.token_accuracy == 1.0) == reproduced
            found[reproduced] += 1
    assert found[True] >= 16
    assert found[False] >= 16


def test_a_model_that_knows_the_answers_scores_everything() -> None:
    asked = [ask(i) for i in range(12)]
    whole = [(*e.prompt_ids, *e.candidate_ids[e.gold]) for e in asked]

    def knows(seen: tuple[int, ...]) -> Tensor:
        logits = torch.zeros(VOCAB)
        for tokens in whole:
            if tokens[: len(seen)] == seen and len(tokens) > len(seen):
                logits[tokens[len(seen)]] = 20.0
        return logits

    _, outcomes = function_score(knows, asked)
    assert all(o.correct and o.recall and o.token_accuracy == 1.0 and o.nats_per_token < 1e-3 for o in outcomes)


def test_a_model_that_knows_nothing_is_at_chance_at_every_position() -> None:
    asked = [replace(ask(i, length=6), client=f"client{i % 3}") for i in range(400)]
    _, outcomes = function_score(lambda seen: torch.zeros(VOCAB), asked, batch=50)
    assert all(o.nats_per_token == pytest.approx(math.log(VOCAB), abs=1e-5) for o in outcomes)
    chosen = Counter(o.chosen for o in outcomes)
    # Four standard errors of 400 fair draws; the candidates differ in length, so length must not matter.
    assert all(abs(chosen[position] - 100) < 4 * math.sqrt(400 * 0.25 * 0.75) for position in range(4))
    assert abs(sum(o.correct for o in outcomes) - 100) < 4 * math.sqrt(400 * 0.25 * 0.75)
    _, again = function_score(lambda seen: torch.full((VOCAB,), 3.0), asked, batch=7)
    assert [o.chosen for o in again] == [o.chosen for o in outcomes]


def test_a_model_that_knows_nothing_is_exactly_at_chance_over_all_places_of_the_answer() -> None:
    asked = [ask(i, length=6) for i in range(60)]
    correct = 0
    for turn in range(4):
        turned = [replace(one, gold=(one.gold + turn) % 4) for one in asked]
        correct += sum(o.correct for o in function_score(lambda seen: torch.zeros(VOCAB), turned, batch=20)[1])
    assert correct == len(asked)  # of 4 * 60 questions, one in four: no place of the right answer is favoured


def test_an_empty_answer_and_a_wrong_one_score_nothing() -> None:
    end = VOCAB - 1
    asked = [
        replace(one, candidate_ids=tuple(tuple(id % end for id in ids) for ids in one.candidate_ids))
        for one in (ask(i) for i in range(12))
    ]
    _, silent = function_score(lambda seen: torch.zeros(VOCAB).index_fill(0, torch.tensor([end]), 20.0), asked)
    assert not any(o.recall for o in silent) and all(o.token_accuracy == 0.0 for o in silent)
    begins = {one.prompt_ids: one.candidate_ids[(one.gold + 1) % 4] for one in asked}

    def errs(seen: tuple[int, ...]) -> Tensor:
        logits = torch.zeros(VOCAB)
        for prompt, wrong in begins.items():
            if seen[: len(prompt)] == prompt and seen[len(prompt) :] == wrong[: len(seen) - len(prompt)] != wrong:
                logits[wrong[len(seen) - len(prompt)]] = 20.0
        return logits

    _, wrong = function_score(errs, asked)
    assert not any(o.correct or o.recall for o in wrong)


def test_ties_are_broken_among_the_tied_only() -> None:
    asked = [replace(ask(i, length=5), candidate_ids=((1,), (2,), (3,), (4,))) for i in range(60)]

    def two_are_likely(seen: tuple[int, ...]) -> Tensor:
        return torch.zeros(VOCAB).index_fill(0, torch.tensor([2, 4]), 1.0)

    _, outcomes = function_score(two_are_likely, asked)
    assert {o.chosen for o in outcomes} == {1, 3}
    assert sorted(tie_order("c", 7, 4)) == [0, 1, 2, 3]
    assert tie_order("c", 7, 4) == tie_order("c", 7, 4)


@pytest.mark.parametrize("gold", [1, 3])
def test_the_right_answers_twin_is_right(gold: int) -> None:
    """A question that offers the right text twice: a tie between the two was broken as if one of them were wrong."""
    asked = [replace(ask(i, length=5), candidate_ids=((1,), (2, 7), (3,), (2, 7)), gold=gold) for i in range(60)]

    def likely(seen: tuple[int, ...]) -> Tensor:
        return torch.zeros(VOCAB).index_fill(0, torch.tensor([2, 7]), 1.0)

    _, outcomes = function_score(likely, asked)
    assert all(o.correct and o.chosen == gold for o in outcomes)
    # Twins among the wrong ones stay wrong.
    _, outcomes = function_score(likely, [replace(one, gold=0) for one in asked])
    assert {o.chosen for o in outcomes} == {1, 3} and not any(o.correct for o in outcomes)


def test_only_the_logits_that_are_needed_are_computed() -> None:
    model, _ = function_score(lambda seen: torch.zeros(VOCAB), [ask(i) for i in range(4)], piece_tokens=8)
    assert model.calls == [(4, 8, 1), (4, 8, 1), (4, 4, 1), (16, 4, 0)]
    letters = [replace(ask(i), candidate_ids=((1,), (2,), (3,), (4,))) for i in range(4)]
    model, _ = function_score(lambda seen: torch.zeros(VOCAB), letters)
    assert model.calls == [(4, 20, 1)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_is_an_error_with_the_arms_name(bad: float) -> None:
    with pytest.raises(FednlError, match='"toy"') as caught:
        function_score(lambda seen: torch.zeros(VOCAB).index_fill(0, torch.tensor([5]), bad), [ask(0)])
    assert not any(str(token) in str(caught.value).split() for token in ask(0).prompt_ids)
    # Also where it only happens inside a candidate.
    with pytest.raises(FednlError, match='"toy"'):
        function_score(lambda seen: torch.full((VOCAB,), bad if len(seen) > 21 else 0.0), [ask(0)])


def test_the_state_is_zeroed_right_before_each_question() -> None:
    seen_at_the_end: dict[int, int] = {}

    def counts(seen: tuple[int, ...]) -> Tensor:
        seen_at_the_end[len(seen)] = seen_at_the_end.get(len(seen), 0) + 1
        logits = torch.zeros(VOCAB)
        logits[len(seen)] = 9.0  # the likeliest token tells how much is remembered
        return logits

    # Each gold says how many tokens follow question_start, which differs between the examples.
    asked = []
    for i in range(9):
        example = ask(i)
        left = 20 - example.question_start
        asked.append(replace(example, candidate_ids=((left, left + 1), (20, 21), (50, 51), (52, 53)), gold=0))
    assert len({e.question_start for e in asked}) == 3
    for batch in (1, 4):
        _, outcomes = function_score(counts, asked, batch=batch, zero_state_at_question=True, piece_tokens=3)
        assert [o.index for o in outcomes] == list(range(9))
        assert all(o.correct and o.recall for o in outcomes)
    _, outcomes = function_score(counts, asked)
    assert all(o.chosen == 1 for o in outcomes)


def test_zeroing_without_a_memory_is_refused() -> None:
    with pytest.raises(SettingsError, match='"state-zeroed"'):
        score_candidates(tiny_llama(), [ask(0)], arm="state-zeroed", make_cache=dynamic, zero_state_at_question=True)


def test_the_prompt_without_events_is_read_where_asked() -> None:
    asked = [ask(i) for i in range(5)]
    swapped = [replace(e, prompt_ids=e.removed_ids) for e in asked]
    model = tiny_llama(2)
    removed = score_candidates(model, asked, arm="a", make_cache=dynamic, ids="removed_ids")
    assert removed == score_candidates(model, swapped, arm="a", make_cache=dynamic)
    assert removed != score_candidates(model, asked, arm="a", make_cache=dynamic)


def test_the_model_is_left_as_it_was_and_progress_is_told() -> None:
    model = tiny_llama(3)
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    told: list[int] = []
    torch.manual_seed(8)
    before = torch.random.get_rng_state()
    score_candidates(model, [ask(i) for i in range(5)], arm="a", make_cache=dynamic, batch=2, on_scored=told.append)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert told == [2, 4, 5]


def test_questions_that_cannot_be_scored_are_refused() -> None:
    model = tiny_llama()
    assert score_candidates(model, [], arm="a", make_cache=dynamic) == []
    with pytest.raises(ValueError, match="at least one token"):
        score_candidates(model, [replace(ask(0), candidate_ids=((1,), ()))], arm="a", make_cache=dynamic)
    with pytest.raises(ValueError, match="batch"):
        score_candidates(model, [ask(0)], arm="a", make_cache=dynamic, batch=0)
