"""Rows padded on the right: `generate` answers each as if it had come alone, as it does rows padded on the left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fednl.errors import BackboneError
from fednl.memory import MemoryCache, load_state, save_state
from memory.models import remember, tiny, tokens, with_memory

LENGTHS = (13, 5, 1)
NEW: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}

pytestmark = pytest.mark.filterwarnings("ignore:A decoder-only architecture")
sizes = pytest.mark.parametrize(("family", "window"), [("llama", 8), ("llama", 0), ("gpt2", 8)])


def rows(side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows of `LENGTHS`, padded on the left or the right."""
    ids, mask = torch.zeros(3, 13, dtype=torch.int64), torch.zeros(3, 13, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        real = slice(0, length) if side == "right" else slice(13 - length, 13)
        ids[row, real], mask[row, real] = tokens(1, length, seed=row)[0], 1
    return ids, mask


def made(model: Any, side: str, **settings: Any) -> Tensor:
    """The new tokens alone."""
    ids, mask = rows(side)
    torch.manual_seed(0)
    found: Tensor = model.generate(ids, attention_mask=mask, **{**NEW, **settings})[:, 13:]
    return found


@pytest.mark.parametrize(
    ("family", "window", "settings"),
    [
        ("llama", 8, {"do_sample": False}),
        ("gpt2", 0, {"do_sample": False}),
        ("llama", 0, {"do_sample": True, "num_return_sequences": 2}),
        ("gpt2", 8, {"do_sample": True}),
        ("llama", 0, {"num_beams": 3}),
        ("gpt2", 8, {"num_beams": 2}),
    ],
)
def test_generate_equals_padding_on_the_left_and_no_padding(family: str, window: int, settings: dict[str, Any]) -> None:
    model = with_memory(family, window_tokens=window)
    found = made(model, "right", **settings)
    assert torch.equal(found, made(model, "left", **settings))
    assert torch.equal(found, made(model, "right", use_cache=False, **settings))
    if not settings.get("do_sample"):
        for row, length in enumerate(LENGTHS):
            alone = model.generate(tokens(1, length, seed=row), **NEW, **settings)
            assert torch.equal(found[row], alone[0, length:])


@sizes
def test_its_logits_are_those_of_each_row_alone_step_by_step(family: str, window: int) -> None:
    model = with_memory(family, window_tokens=window).double()
    ids, mask = rows("right")
    wanted: dict[str, Any] = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    together = model.generate(ids, attention_mask=mask, **NEW, **wanted)
    assert int(together.cache.counts[1]) == 5 + 4
    for row, length in enumerate(LENGTHS):
        alone = model.generate(tokens(1, length, seed=row), **NEW, **wanted)
        for one, other in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(one[row], other[0], atol=1e-5, rtol=1e-5)


@sizes
def test_a_conversation_goes_on_after_it(family: str, window: int) -> None:
    model, (ids, mask) = with_memory(family, window_tokens=window), rows("right")
    cache, settings = MemoryCache(model), {**NEW, "do_sample": False}
    first = model.generate(ids, attention_mask=mask, cache=cache, **settings)
    more = tokens(3, 6, seed=9)
    longer = torch.cat([first, more], 1)
    seen = torch.cat([mask, torch.ones(3, 5 + 6, dtype=torch.int64)], 1)
    second = model.generate(longer, attention_mask=seen, cache=cache, **settings)[:, longer.shape[1] :]
    for row, length in enumerate(LENGTHS):
        alone = torch.cat([ids[row, :length], first[row, 13:], more[row]])[None]
        assert torch.equal(second[row], model.generate(alone, use_cache=False, **settings)[0, alone.shape[1] :])


def test_a_pass_that_asks_for_every_position_gives_the_paddings_too() -> None:
    """Scoring reads right-padded rows with a cache, and looks at real positions only."""
    model, (ids, mask) = with_memory(), rows("right")
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=True).logits
        last = model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1).logits
    assert whole.shape[1] == 13 and last.shape[1] == 1
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(last[row, 0], whole[row, length - 1])
        assert length == 13 or not torch.allclose(last[row, 0], whole[row, -1], atol=1e-3)


def test_positions_that_count_padding_are_the_callers_own() -> None:
    model, (ids, mask) = with_memory("llama", window_tokens=0), rows("right")
    cache, slots = MemoryCache(model), torch.arange(16).expand(3, -1)
    longer, seen = torch.cat([ids, tokens(3, 3)], 1), torch.cat([mask, torch.ones(3, 3, dtype=torch.int64)], 1)
    whole = model(longer, attention_mask=seen, position_ids=slots, use_cache=False).logits[:, 13:]
    model(ids, attention_mask=mask, position_ids=slots[:, :13], cache=cache)
    pieces = model(longer[:, 13:], attention_mask=seen, position_ids=slots[:, 13:], cache=cache).logits
    torch.testing.assert_close(pieces, whole, atol=2e-5, rtol=1e-4)
    counted = model(longer, attention_mask=seen, position_ids=(seen.cumsum(1) - 1), use_cache=False).logits[:, 13:]
    assert not torch.allclose(counted, whole, atol=1e-3)


def test_a_saved_conversation_still_knows_where_a_padded_row_ended(tmp_path: Path) -> None:
    model, (ids, mask) = with_memory("llama", window_tokens=0), rows("right")
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)  # as `generate` counts
    cache, more = MemoryCache(model), tokens(3, 2, seed=4)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, cache=cache)
        loaded = load_state(model, save_state(cache, tmp_path / "state"))
        found = [
            model(more, position_ids=positions[:, -1:] + torch.tensor([1, 2]), cache=one).logits
            for one in (loaded, cache)
        ]
        assert torch.equal(*found)
        for row, length in enumerate(LENGTHS):
            alone = model(torch.cat([ids[row, :length], more[row]])[None], use_cache=False).logits[0, length:]
            torch.testing.assert_close(found[0][row], alone, atol=2e-5, rtol=1e-4)


def test_a_row_that_ended_before_the_last_piece_is_refused() -> None:
    """What its last token came to is gone, and the padding's logits would be taken for it."""
    model, (ids, mask) = with_memory(), rows("right")
    with pytest.raises(BackboneError, match=r"Row 1 has only padding in this pass .* pad on the left"):
        model.generate(ids, attention_mask=mask, prefill_chunk_size=8, cache=MemoryCache(model), **NEW)
    cache = MemoryCache(model)
    with torch.no_grad():
        model(ids[:, :8], attention_mask=mask[:, :8], cache=cache)
        scored = model(ids[:, 8:], attention_mask=mask[:, 8:], cache=cache).logits
    assert scored.shape[1] == 5
    left, seen = rows("left")  # rows that have not begun yet are as they were
    whole = model.generate(left, attention_mask=seen, do_sample=False, **NEW)
    again = MemoryCache(model)
    found = model.generate(left, attention_mask=seen, do_sample=False, prefill_chunk_size=8, cache=again, **NEW)
    assert torch.equal(found, whole)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_generate_of_a_wrapper_asks_as_the_model_does() -> None:
    """PEFT's own `generate` passes its wrapper's forward by."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"]))
    remember(wrapped)
    assert torch.equal(made(wrapped, "right", do_sample=False), made(wrapped, "left", do_sample=False))


def test_full_attention_counts_padding_between_pieces_unless_positions_say_otherwise() -> None:
    """The bare model does so, and a closed gate is the bare model; a window counts real tokens by itself."""
    ids, mask = tokens(1, 12), torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
    counted, real = (mask.cumsum(1) - 1).clamp(min=0), mask.bool()
    for window, told, equal in ((8, {}, True), (0, {}, False), (0, {"position_ids": counted}, True)):
        model = with_memory("llama", window_tokens=window)
        alone = model(ids[real][None], use_cache=False).logits[0]
        padded = model(ids, attention_mask=mask, use_cache=False, **told).logits[real]
        assert torch.allclose(padded, alone, atol=2e-4) is equal
