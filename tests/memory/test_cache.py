"""The cache: nothing kept alive unseen, nothing lost on the way, no model but its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fednl.errors import BackboneError
from fednl.memory import MemoryCache, detach_memory, rules
from memory.models import tiny, tokens, with_memory


@pytest.mark.parametrize(
    "settings",
    [{"sink_tokens": 0}, {"keys": "context", "write": "leaving"}, {"window_tokens": 0, "keys": "context"}],
)
def test_no_view_keeps_more_alive_than_the_cache_shows(settings: dict[str, Any]) -> None:
    model = with_memory(**settings)
    cache = MemoryCache(model)
    with torch.no_grad():
        for piece in tokens(1, 330).split(150, 1):
            model(piece, cache=cache)
    held = {f"{i}.{name}": t for i, layer in enumerate(cache.layers) for name, t in vars(layer.tensors).items()}
    for name, tensor in {**held, "counts": cache.counts, "positions": cache.positions}.items():
        if tensor is not None:
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name


def test_a_deep_copy_is_the_conversation_and_not_the_model() -> None:
    model, ids = with_memory(), tokens(1, 20)
    cache = MemoryCache(model)
    model(ids[:, :12], cache=cache)
    other = copy.deepcopy(cache)
    expected = model(ids[:, 12:], cache=cache).logits
    assert torch.equal(model(ids[:, 12:], cache=other).logits, expected)


@pytest.mark.parametrize("keys", ["token", "context"])
@pytest.mark.parametrize("write", ["now", "leaving"])
def test_after_its_state_is_forgotten_a_cache_goes_on_in_any_pieces(keys: str, write: str) -> None:
    model, ids = with_memory(keys=keys, write=write), tokens(2, 40)
    after = []
    for size in (20, 3):
        cache = MemoryCache(model)
        model(ids[:, :20], cache=cache)
        cache.reset_state()
        assert not any(layer.tensors.state.any() for layer in cache.layers)
        after.append(torch.cat([model(piece, cache=cache).logits for piece in ids[:, 20:].split(size, 1)], 1))
    torch.testing.assert_close(after[1], after[0], atol=2e-5, rtol=1e-4)


EVERYTHING: dict[str, Any] = {"rule": "ttt-linear", "conv_tokens": 3, "keys": "context", "write": "leaving"}
"""Settings under which the cache holds every kind of tensor but momentum."""


@pytest.mark.parametrize("settings", [EVERYTHING, {"rule": "titans"}, {"window_tokens": 0}])
def test_rows_are_repeated_selected_and_reordered_with_all_that_they_hold(settings: dict[str, Any]) -> None:
    model, ids, more = with_memory(**settings), tokens(3, 15), tokens(3, 4, seed=7)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    cache = MemoryCache(model)
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
        expected = model(more, cache=cache.clone()).logits
        changes: dict[str, tuple[Any, list[int]]] = {
            "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
            "batch_select_indices": (torch.tensor([2, 0]), [2, 0]),
            "reorder_cache": (torch.tensor([1, 1, 0]), [1, 1, 0]),
        }
        for name, (argument, rows) in changes.items():
            changed = cache.clone()
            getattr(changed, name)(argument)
            assert changed.size_bytes() * 3 == cache.size_bytes() * len(rows)
            torch.testing.assert_close(model(more[rows], cache=changed).logits, expected[rows], atol=2e-5, rtol=1e-4)
        assert torch.equal(model(more, cache=cache).logits, expected), "the copies left it as it was"
        cache.reset()
        assert (cache.size_bytes(), cache.get_seq_length(), cache.has_padding) == (0, 0, False)
        fresh = model(ids[:2], cache=cache).logits
        assert torch.equal(fresh, model(ids[:2], cache=MemoryCache(model)).logits)


def test_a_detached_copy_goes_on_the_same_without_its_history() -> None:
    model, ids = with_memory(**EVERYTHING), tokens(1, 24)
    cache = MemoryCache(model)
    model(ids[:, :14], cache=cache)
    apart = cache.detach()
    tensors = [t for layer in apart.layers for t in vars(layer.tensors).values() if t is not None]
    assert tensors and not any(t.requires_grad for t in tensors)
    assert any(t.requires_grad for layer in cache.layers for t in vars(layer.tensors).values() if t is not None)
    gradients = []
    for one in (apart, cache):
        logits = model(ids[:, 14:], cache=one).logits
        gradients.append([logits, *torch.autograd.grad(logits.square().sum(), list(rules(model).values()))])
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert not all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True)), "truncated is not the whole gradient"


def test_a_model_without_memory_cannot_use_it() -> None:
    """Its pass would never end for the cache, and every piece would begin the conversation anew."""
    model = with_memory()
    cache = MemoryCache(model)
    detach_memory(model)
    for other in (model, tiny("llama")):
        with pytest.raises(BackboneError, match="has none attached"):
            other(tokens(1, 4), cache=cache)


def test_gradients_run_through_the_pieces_as_through_one_pass() -> None:
    model, ids = with_memory(keys="context", write="leaving").double(), tokens(2, 24)
    gradients = []
    for size in (24, 7):
        cache = MemoryCache(model)
        logits = torch.cat([model(piece, cache=cache).logits for piece in ids.split(size, 1)], 1)
        gradients.append(torch.autograd.grad(logits.square().mean(), list(rules(model).values())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one, atol=1e-9, rtol=1e-7)
