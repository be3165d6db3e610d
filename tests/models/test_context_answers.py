"""Injection from the answer on: what stands before is the plain model's, and running the answers alone is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from context_models import build, by_hand, filled, logits
from torch import Tensor
from transformers import DynamicCache

from fednl.data.batches import IGNORED
from fednl.memory.sites import cache_argument
from fednl.models.context_injection import trunk_of
from fednl.models.context_vectors import (
    answering,
    answers_of,
    context_of,
    context_params,
    detach_context,
    keep_prompts,
    mean_outputs,
)
from fednl.models.settings import ContextVectorSettings
from fednl.problem import answer_nats

ANSWER = ContextVectorSettings(start_lambda=0.0, inject="answer")
PROMPTS, ANSWERS = (5, 2, 7), (2, 3, 1)


def batch_of(tokens: Tensor) -> dict[str, Tensor]:
    """Rows of unlike length, right-padded: prompt, answer, padding."""
    labels, mask = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        labels[row, prompt : prompt + answer] = tokens[row, prompt : prompt + answer]
        mask[row, : prompt + answer] = 1
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


def nats_and_gradient(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss = answer_nats(model, batch)
    return loss.detach(), torch.autograd.grad(loss, [context_of(model).coefficients])[0]


def keeping(model: Any) -> Any:
    keep_prompts(model, ANSWER)
    return context_of(model).prompts


def test_before_the_answer_the_model_is_plain_and_from_it_on_injected_as_by_hand(layout: str, tokens: Tensor) -> None:
    model = build(layout)
    plain, first = logits(model, tokens), torch.tensor([4, 1, 6])
    filled(model, ANSWER)
    with answering(model, first):
        found = logits(model, tokens)
    coefficients, vectors = (t.detach().clone() for t in context_params(model).values())
    detach_context(model)
    where = torch.arange(9) >= first[:, None]
    with by_hand(model, coefficients, vectors, where[..., None]):
        expected = logits(model, tokens)
    assert torch.equal(found, expected)
    assert torch.allclose(found[~where], plain[~where], atol=1e-12)
    assert not torch.allclose(found[where], plain[where], atol=1e-3)


def test_running_the_answers_alone_gives_the_same_loss_and_gradient_as_the_whole_texts(
    layout: str, tokens: Tensor
) -> None:
    model, batch = filled(build(layout), ANSWER), batch_of(tokens)
    whole = nats_and_gradient(model, batch)
    prompts = keeping(model)
    for computed in (3, 3):  # the second time nothing of the prompts is left to do
        found = nats_and_gradient(model, batch)
        assert torch.allclose(found[0], whole[0], atol=1e-6) and torch.allclose(found[1], whole[1], atol=1e-5)
        assert prompts.computed == computed
    other = {name: t[[1, 0]] for name, t in batch.items()}
    context_of(model).coefficients.data.add_(0.1)
    found = nats_and_gradient(model, other)
    assert prompts.computed == 3
    context_of(model).prompts = None
    whole = nats_and_gradient(model, other)
    assert torch.allclose(found[0], whole[0], atol=1e-6) and torch.allclose(found[1], whole[1], atol=1e-5)
    answers = prompts.answers(batch)
    assert answers.inputs["input_ids"].shape == (3, 3)  # the longest answer, not the longest text


def test_reading_leaves_what_the_first_step_needs(tokens: Tensor) -> None:
    model, batch = filled(build("Llama"), ANSWER), batch_of(tokens)
    prompts = keeping(model)
    first = torch.tensor(PROMPTS) - 1
    ends = {"last": first, "label": first + 1, "separator": first + torch.tensor(ANSWERS)}
    read = mean_outputs(model, [{**batch, **ends}], ANSWER, torch.Generator())
    assert prompts.computed == 3
    kept = nats_and_gradient(model, batch)
    assert prompts.computed == 3
    context_of(model).prompts = None
    again = mean_outputs(model, [{**batch, **ends}], ANSWER, torch.Generator())
    torch.testing.assert_close(again, read, rtol=1e-6, atol=1e-7)
    whole = nats_and_gradient(model, batch)
    assert torch.allclose(kept[0], whole[0], atol=1e-6) and torch.allclose(kept[1], whole[1], atol=1e-5)


def test_no_bit_depends_on_what_was_kept_nor_on_the_company_it_was_met_in(layout: str, tokens: Tensor) -> None:
    """So a run that is taken up again, or whose clients go to other workers, ends with the same coefficients."""
    model, batch = filled(build(layout, torch.bfloat16), ANSWER), batch_of(tokens)
    keeping(model)
    shapes: list[tuple[int, ...]] = []
    watch = trunk_of(model).register_forward_pre_hook(
        lambda module, args, given: shapes.append(tuple((args[0] if args else given["input_ids"]).shape)),
        with_kwargs=True,
    )
    cold = nats_and_gradient(model, batch)
    watch.remove()
    assert shapes[:3] == [(1, prompt - 1) for prompt in PROMPTS] and shapes[3:] == [(3, max(ANSWERS))]
    keeping(model)
    nats_and_gradient(model, {name: x[1:2] for name, x in batch.items()})
    nats_and_gradient(model, {name: x[:2] for name, x in batch.items()})
    for again in (nats_and_gradient(model, batch), nats_and_gradient(model, batch)):
        assert torch.equal(again[0], cold[0]) and torch.equal(again[1], cold[1])


def test_prompts_beyond_the_limit_are_computed_every_time(tokens: Tensor) -> None:
    model, batch = filled(build("Llama"), ANSWER), batch_of(tokens)
    whole = nats_and_gradient(model, batch)
    prompts = keeping(model)
    prompts._limit_bytes = 2 * 2 * 2 * 4 * 8 * 8  # layers, keys and values, KV heads, tokens, numbers, float64
    for computed in (3, 5):  # one prompt of three is kept
        found = nats_and_gradient(model, batch)
        assert torch.allclose(found[0], whole[0], atol=1e-6)
        assert prompts.computed == computed
    assert 0 < prompts.held_bytes <= prompts._limit_bytes
    keep_prompts(filled(build("Qwen2"), ANSWER), ANSWER.model_copy(update={"keep_mb": 0}))


@pytest.mark.parametrize(("inject", "keep_mb"), [("all", 2000), ("answer", 0)])
def test_where_there_is_nothing_to_keep_the_whole_text_runs(inject: Any, keep_mb: int, tokens: Tensor) -> None:
    settings = ContextVectorSettings(inject=inject, keep_mb=keep_mb)
    model = filled(build("Llama"), settings)
    keep_prompts(model, settings)
    assert context_of(model).prompts is None and answers_of(model, batch_of(tokens)) is None


def test_a_prompt_of_one_token_is_run_whole(tokens: Tensor) -> None:
    model, batch = filled(build("Llama"), ANSWER), batch_of(tokens)
    batch["labels"][0, 1] = batch["input_ids"][0, 1]
    whole = nats_and_gradient(model, batch)
    assert keeping(model).answers(batch) is None
    assert torch.equal(nats_and_gradient(model, batch)[0], whole[0])


def test_in_pieces_and_token_by_token_the_answer_begins_at_the_same_place(layout: str, tokens: Tensor) -> None:
    model = filled(build(layout), ANSWER)
    with answering(model, 5):
        whole = logits(model, tokens)
        cache, pieces = DynamicCache(config=model.config), []
        for piece in tokens.split([4, 2, 1, 2], dim=1):
            with torch.no_grad():
                pieces.append(model(input_ids=piece, use_cache=True, **{cache_argument(model): cache}).logits)
    assert torch.allclose(torch.cat(pieces, dim=1), whole, atol=1e-6)


def test_unsaid_the_answer_begins_at_each_rows_last_token_and_goes_on_in_generation(tokens: Tensor) -> None:
    model = filled(build("Llama"), ANSWER)
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    found = logits(model, tokens, mask)
    with answering(model, torch.tensor([5, 8, 8])):
        assert torch.equal(logits(model, tokens, mask), found)
    made = model.generate(tokens[:1], max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    with answering(model, 8):
        again = logits(model, made[:, :-1])[0, 8:].argmax(1)
    assert torch.equal(made[0, 9:], again)
