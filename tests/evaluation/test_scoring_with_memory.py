"""Scoring on a model with memory attached: the cache holds sinks, window and state."""

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fednl.evaluation.scoring import score_candidates
from fednl.memory import MemoryCache, MemoryConfig, attach_memory, closed, rules

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


def ask(index: int) -> Asked:
    rng = torch.Generator().manual_seed(index)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB, (count,), generator=rng).tolist())

    prompt, candidates = ids(30), (ids(3), ids(1), ids(5), ids(2))
    return Asked("c", index, prompt, prompt, 24 + index % 3, candidates, index % 4)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    bare = LlamaForCausalLM(
        LlamaConfig(
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
    ).eval()
    attached = attach_memory(bare, MemoryConfig(layers="all", window_tokens=6, sink_tokens=2))
    with torch.no_grad():
        for parameter in rules(attached).values():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return attached


def token_by_token(model: PreTrainedModel, example: Asked, zero_state: bool) -> float:
    """The right candidate's mean log probability, one token and one row at a time."""
    cache = MemoryCache(model)
    total, answer = 0.0, example.candidate_ids[example.gold]
    tokens = [*example.prompt_ids, *answer]
    with torch.no_grad():
        for place, token in enumerate(tokens[:-1]):
            if zero_state and place == example.question_start:
                cache.reset_state()
            logits = model(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True).logits[0, -1]
            if place + 1 >= len(example.prompt_ids):
                total += float(logits.double().log_softmax(-1)[tokens[place + 1]])
    return total / len(answer)


@pytest.mark.parametrize("zero_state", [False, True])
def test_scores_equal_one_token_at_a_time(model: PreTrainedModel, zero_state: bool) -> None:
    asked = [ask(i) for i in range(5)]
    first = score_candidates(model, asked, arm="a", make_cache=MemoryCache, zero_state_at_question=zero_state, batch=8)
    for example, outcome in zip(asked, first, strict=True):
        assert outcome.logprob_gold == pytest.approx(token_by_token(model, example, zero_state), abs=1e-4)
    for batch, pieces in [(1, 2048), (4, 2048), (2, 7)]:
        again = score_candidates(
            model,
            asked,
            arm="a",
            make_cache=MemoryCache,
            zero_state_at_question=zero_state,
            batch=batch,
            piece_tokens=pieces,
        )
        for one, other in zip(first, again, strict=True):
            assert other.nats_per_token == pytest.approx(one.nats_per_token, abs=1e-4)
            assert replace(other, nats_per_token=one.nats_per_token) == one


def test_the_arms_differ_and_leave_no_trace(model: PreTrainedModel) -> None:
    asked = [ask(i) for i in range(4)]

    def nats(zero_state: bool = False) -> list[float]:
        outcomes = score_candidates(model, asked, arm="a", make_cache=MemoryCache, zero_state_at_question=zero_state)
        return [outcome.nats_per_token for outcome in outcomes]

    federated, zeroed = nats(), nats(zero_state=True)
    with closed(model):
        window_only = nats()
    assert all(abs(a - b) > 1e-3 for a, b in zip(federated, zeroed, strict=True))
    assert all(abs(a - b) > 1e-3 for a, b in zip(federated, window_only, strict=True))
    assert nats() == federated
