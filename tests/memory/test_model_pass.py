"""One pass: what it refuses, what a failure leaves behind, and who else may be running."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch

from fednl.errors import BackboneError, NonFiniteError
from fednl.memory import MemoryCache, closed, rules
from fednl.memory.layer_hooks import _CALLS, CONTEXT
from memory.models import tokens, with_memory

pytestmark = pytest.mark.usefixtures("both_keys")


class Boom(Exception):
    """What a part of the model raises here."""


def broken(error: type[BaseException]) -> Any:
    """A forward that raises an `error`."""

    def forward(*args: object, **kwargs: object) -> None:
        raise error

    return forward


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["q_proj", "o_proj", "mlp", "memory", "norm", "head"])
def test_wherever_a_call_fails_it_leaves_nothing_behind(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = with_memory(), tokens(1, 20)
    block = model.model.layers[1]
    parts = {"mlp": block.mlp, "norm": model.model.norm, "head": model.lm_head}
    part = parts[where] if where in parts else getattr(block.self_attn, where)
    cache = MemoryCache(model)
    model(ids[:, :10], cache=cache)
    expected = model(ids[:, 10:], cache=cache.clone()).logits
    with monkeypatch.context() as patch:
        patch.setattr(part, "forward", broken(error))
        with pytest.raises(error):
            model(ids[:, 10:], cache=cache)
    gc.collect()
    assert not any(reference() for reference in _CALLS.frames)
    assert cache.seen_tokens == 10
    assert torch.equal(model(ids[:, 10:], cache=cache).logits, expected)
    x = torch.randn(1, 3, 32)
    o_proj = block.self_attn.o_proj
    assert torch.equal(o_proj(x), torch.nn.functional.linear(x, o_proj.weight, o_proj.bias))


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("alone", [False, True], ids=["causal model", "decoder alone"])
def test_what_a_pass_held_is_gone_with_it_and_needs_no_garbage_collector(alone: bool, learns: bool) -> None:
    """A ring of references would let a long stream hold many passes until Python looks for rings."""
    model, ids = with_memory(), tokens(1, 20)
    held: list[weakref.ref[Any]] = []
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda m, a, kw: held.append(weakref.ref(kw[CONTEXT])), with_kwargs=True)
    gc.disable()
    try:
        with torch.set_grad_enabled(learns):
            (model.model if alone else model)(ids, use_cache=not learns)
        assert len(held) == 1 and held[0]() is None
    finally:
        gc.enable()


def test_labels_that_do_not_fit_cost_the_conversation_nothing() -> None:
    model, ids = with_memory(), tokens(1, 20)
    cache = MemoryCache(model)
    with pytest.raises(ValueError, match="batch_size"):
        model(ids, labels=ids[:, :3], cache=cache)
    assert cache.seen_tokens == 0
    model.model(ids, cache=cache)
    assert cache.seen_tokens == 20, "the decoder called alone commits by itself"


def test_a_pass_may_run_inside_another_and_a_wrong_one_harms_only_itself() -> None:
    model, ids = with_memory(), tokens(1, 20)
    expected = model(ids, use_cache=False).logits
    attention = model.model.layers[1].self_attn
    inside: list[str] = []

    def hook(*args: object) -> None:
        if not inside:
            inside.append("pass")
            model(tokens(1, 7, seed=4), use_cache=False)
            with pytest.raises(BackboneError, match="called outside its model's forward"):
                attention(hidden_states=torch.zeros(1, 3, 32))

    handle = attention.k_proj.register_forward_hook(hook)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    handle.remove()
    assert inside == ["pass"]


def test_threads_share_a_model() -> None:
    model, rows = with_memory(), [tokens(1, 30, seed=seed) for seed in range(2)]
    expected = [model(row, use_cache=False).logits for row in rows]
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            with torch.no_grad():
                same = [torch.equal(model(rows[number], use_cache=False).logits, expected[number]) for _ in range(40)]
            wrong.extend(one for one in same if not one)
        except Exception as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_d22_under_checkpointing_no_cache_is_made_and_none_is_taken(family: str) -> None:
    model, ids = with_memory(family), tokens(2, 24)
    cache = MemoryCache(model)
    model.train().activation_checkpointing_enable()
    output = model(ids, labels=ids)
    assert output.cache is None
    output.loss.backward()
    plain = with_memory(family)
    plain(ids, labels=ids, use_cache=False).loss.backward()
    for name, rule in rules(plain).items():
        torch.testing.assert_close(rules(model)[name].grad, rule.grad, msg=name)
    with pytest.raises(BackboneError, match="leave the MemoryCache out"):
        model(ids, cache=cache)
    with torch.no_grad():
        model(ids, cache=cache)
    assert cache.seen_tokens == 24


def test_a_pass_that_began_with_the_gate_closed_is_recomputed_with_it_closed() -> None:
    gradients = []
    for checkpointing in (False, True):
        model, ids = with_memory(), tokens(2, 24)
        weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable()
        with closed(model):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients)


def test_a_closed_gate_hears_nothing_of_a_ruined_memory() -> None:
    """0 times a number that is none is none: a closed gate must not multiply."""
    model, ids = with_memory(window_tokens=0), tokens(1, 20)
    with closed(model):
        expected = model(ids, use_cache=False).logits
        with torch.no_grad():
            for name, rule in rules(model).items():
                if name.endswith("v_up"):
                    rule.fill_(float("inf"))
        assert torch.equal(model(ids, use_cache=True).logits, expected)
    with pytest.raises(NonFiniteError, match=r"^Memory layer 0: its rules hold NaN or infinity"):
        model(ids)


def test_what_a_pass_cannot_do_is_refused_in_one_sentence() -> None:
    model, ids = with_memory(), tokens(1, 8)
    with pytest.raises(BackboneError, match="1 rows of 0 tokens"):
        model(ids[:, :0])
    with pytest.raises(BackboneError, match="0 rows of 8 tokens"):
        model(ids[:0])
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model()
    with pytest.raises(BackboneError, match="attention_mask is a dict"):
        model(ids, attention_mask={"full_attention": None})
    with pytest.raises(BackboneError, match="output_attentions"):
        model(ids, output_attentions=True)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    for cached in ({"use_cache": True}, {"cache": MemoryCache(model)}):
        for told in ({"position_ids": packed}, {"doc_ids": torch.tensor([[5, 5, 5, 5, 2, 2, 2, 2]])}):
            with pytest.raises(BackboneError, match="one document a row"):
                model(ids, **told, **cached)
    with pytest.raises(BackboneError, match=r"doc_ids must be integers of shape \[1, 8\] as the input, not \[1, 7\]"):
        model(ids, doc_ids=packed[:, 1:])
    padded = torch.tensor([[1, 1, 1, 0, 1, 2, 3, 4]])
    model(ids, position_ids=padded, attention_mask=torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]))


def test_embeddings_do_as_well_as_ids() -> None:
    model, ids = with_memory(), tokens(2, 20)
    embeds = model.get_input_embeddings()(ids)
    expected = model(ids, use_cache=False).logits
    assert torch.equal(model(inputs_embeds=embeds, use_cache=False).logits, expected)
    cache = MemoryCache(model)
    parts = [model(inputs_embeds=embeds[:, :9], cache=cache).logits, model(ids[:, 9:], cache=cache).logits]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [0, 8])
def test_generate_samples_and_goes_on_as_without_a_cache(window: int) -> None:
    model, ids = with_memory(window_tokens=window), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    settings: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    made = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        made.append(
            model.generate(
                ids, attention_mask=mask, use_cache=use_cache, do_sample=True, num_return_sequences=3, **settings
            )
        )
    assert torch.equal(*made)
    cache = MemoryCache(model)
    first = model.generate(ids[1:], cache=cache, do_sample=False, **settings)
    longer = torch.cat([first, tokens(1, 5, seed=8)], 1)
    second = model.generate(longer, cache=cache, do_sample=False, **settings)
    assert torch.equal(second, model.generate(longer, use_cache=False, do_sample=False, **settings))
