"""Packed documents: each is as if it had come alone, whatever stands beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fednl.memory import rules
from memory.models import remember, tiny, tokens, with_memory

LENGTHS = ((9, 1, 12), (14, 8, 0))
"""Of the documents in each row; what is left of 24 tokens is padding, at both ends."""


def packed() -> tuple[Tensor, Tensor, Tensor, list[tuple[int, int, int]]]:
    """Ids, mask, document numbers, and (row, first, last) of every document."""
    ids, mask, docs = tokens(2, 24), torch.zeros(2, 24, dtype=torch.int64), torch.zeros(2, 24, dtype=torch.int64)
    places = []
    for row, lengths in enumerate(LENGTHS):
        at = row
        for number, length in enumerate(lengths):
            mask[row, at : at + length], docs[row, at : at + length] = 1, 7 - number
            if length:
                places.append((row, at, at + length))
            at += length
    return ids, mask, docs, places


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"keys": "context", "write": "leaving", "rule": "titans", "conv_tokens": 3}),
        ("qwen2", {"window_tokens": 0}),
        ("gpt2", {"rule": "ttt-linear"}),
    ],
)
def test_every_document_is_as_if_it_were_alone_with_gradients(family: str, settings: dict[str, Any]) -> None:
    model = with_memory(family, **settings).double()
    ids, mask, docs, places = packed()
    together = model(ids, attention_mask=mask, doc_ids=docs, output_hidden_states=True)
    alone = [model(ids[row : row + 1, a:b], use_cache=False).logits[0] for row, a, b in places]
    found = [together.logits[row, a:b] for row, a, b in places]
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert all(x.shape == (2, 24, 32) for x in together.hidden_states)
    gradients = []
    for parts in (found, alone):
        total = sum((part.square().sum() for part in parts), torch.zeros(()))
        gradients.append(torch.autograd.grad(total, list(rules(model).values())))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)


def test_positions_that_start_again_say_the_same() -> None:
    model, ids = with_memory(), tokens(1, 20)
    positions = torch.cat([torch.arange(7), torch.arange(13)]).unsqueeze(0)
    docs = torch.tensor([[3] * 7 + [3_000_000_000] * 13])
    by_positions = model(ids, position_ids=positions).logits
    assert torch.equal(by_positions, model(ids, doc_ids=docs).logits)
    torch.testing.assert_close(by_positions[:, 7:], model(ids[:, 7:], use_cache=False).logits, atol=2e-5, rtol=1e-4)
    hidden = model.model(ids, doc_ids=docs, return_dict=False)[0]
    torch.testing.assert_close(model.lm_head(hidden), by_positions)


def test_one_document_a_row_is_a_pass_like_any_other() -> None:
    model, ids = with_memory(), tokens(2, 12)
    docs = torch.tensor([[4] * 12, [9] * 12])
    assert torch.equal(model(ids, doc_ids=docs).logits, model(ids).logits)


def test_training_under_checkpointing_with_labels() -> None:
    ids, mask, docs, _ = packed()
    labels, losses = ids.masked_fill(mask == 0, -100), []
    for checkpointing in (False, True):
        model = with_memory("qwen2").train()
        if checkpointing:
            model.activation_checkpointing_enable()
        loss = model(ids, attention_mask=mask, doc_ids=docs, labels=labels).loss
        loss.backward()
        losses.append([loss.detach(), *[rule.grad for rule in rules(model).values()]])
    torch.testing.assert_close(losses[1], losses[0])


def test_under_full_attention_and_closed_it_is_the_backbones_own_packing() -> None:
    from fednl.memory import closed

    ids, positions = tokens(1, 20), torch.cat([torch.arange(7), torch.arange(13)]).unsqueeze(0)
    expected = tiny("llama")(ids, position_ids=positions, use_cache=False).logits
    model = with_memory("llama", window_tokens=0)
    with closed(model):
        torch.testing.assert_close(model(ids, position_ids=positions).logits, expected, atol=2e-5, rtol=1e-4)


def test_attention_weights_come_in_the_callers_rows() -> None:
    """As a model with masks between documents gives them: nothing from one document to another."""
    model = tiny("llama")
    model.set_attn_implementation("eager")
    remember(model, window_tokens=0)
    ids, mask, docs, places = packed()
    wanted = {"output_attentions": True, "output_hidden_states": True}
    together = model(ids, attention_mask=mask, doc_ids=docs, **wanted)
    assert len(together.attentions) == 3
    for layer, weights in enumerate(together.attentions):
        assert weights.shape == (2, 4, 24, 24)
        rest = weights.clone()
        for row, a, b in places:
            alone = model(ids[row : row + 1, a:b], use_cache=False, **wanted)
            torch.testing.assert_close(weights[row, :, a:b, a:b], alone.attentions[layer][0], atol=2e-5, rtol=1e-4)
            rest[row, :, a:b, a:b] = 0
        assert not rest.any()
    bare = model.model(ids, attention_mask=mask, doc_ids=docs, return_dict=False, **wanted)
    shapes = [[x.shape for x in part] for part in bare[1:]]
    assert shapes == [[(2, 24, 32)] * 4, [(2, 4, 24, 24)] * 3]
