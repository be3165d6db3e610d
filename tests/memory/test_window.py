"""The window: any padding, any pieces, any sizes give what the row alone gives in one pass."""

from __future__ import annotations

import random

import pytest
import torch

import fednl.memory.window
from fednl.memory import MemoryCache
from memory.models import tokens, with_memory


def a_piece(draw: random.Random, rows: list[torch.Tensor], at: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The next few tokens of every row, padded on the left, on the right or anywhere; none at all for some."""
    sizes = [min(draw.choice([0, 1, 2, 5, 11, 20]), len(row) - start) for row, start in zip(rows, at, strict=True)]
    width = max(max(sizes) + draw.choice([0, 0, 1, 3]), 1)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for number, size in enumerate(sizes):
        anywhere = sorted(draw.sample(range(width), size))
        slots = draw.choice([list(range(width - size, width)), list(range(size)), anywhere])
        ids[number, slots] = rows[number][at[number] : at[number] + size]
        mask[number, slots] = 1
    return ids, mask


@pytest.mark.parametrize("seed", range(10))
def test_padded_rows_in_pieces_equal_each_row_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(fednl.memory.window, "BLOCK_TOKENS", draw.choice([3, 7, 256]))
    model = with_memory(
        draw.choice(["llama", "qwen2"]),
        window_tokens=draw.choice([1, 2, 5, 9, 60]),
        sink_tokens=draw.choice([0, 1, 3, 12]),
        keys=draw.choice(["token", "context"]),
        write=draw.choice(["now", "leaving"]),
        mixing=draw.choice(["additive", "convex"]),
    ).double()
    rows = [tokens(1, draw.randint(3, 40), seed=number)[0] for number in range(draw.randint(1, 3))]
    cache, at, parts = MemoryCache(model), [0] * len(rows), [[] for _ in rows]
    with torch.no_grad():
        while any(start < len(row) for row, start in zip(rows, at, strict=True)):
            ids, mask = a_piece(draw, rows, at)
            logits = model(ids, attention_mask=mask, cache=cache).logits
            for number in range(len(rows)):
                parts[number].append(logits[number, mask[number].bool()])
                at[number] += int(mask[number].sum())
        for row, part in zip(rows, parts, strict=True):
            alone = model(row[None], use_cache=False).logits[0]
            torch.testing.assert_close(torch.cat(part), alone, atol=1e-9, rtol=1e-9)


def test_a_padded_conversation_goes_on_in_blocks() -> None:
    """Memory for the masks of a long piece grows with its length, also after a padded one."""
    model, ids = with_memory(layers="none", window_tokens=8, sink_tokens=2), tokens(2, 1216)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    cache, seen = MemoryCache(model), []
    make = fednl.memory.window._blocks

    def spy(*args: object) -> list[fednl.memory.window.Block]:
        seen.append(make(*args))  # type: ignore[arg-type]
        return seen[-1]

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fednl.memory.window, "_blocks", spy)
        first = model(ids[:, :16], attention_mask=mask[:, :16], cache=cache).logits
        second = model(ids[:, 16:], attention_mask=mask, cache=cache).logits
    assert [len(blocks) for blocks in seen] == [1, 5]
    assert sum(block.hidden.numel() for block in seen[1] if block.hidden is not None) < 2 * 1200 * 300
    alone = model(ids[:1, 7:], use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat([first[0], second[0]])[7:], alone, atol=2e-5, rtol=1e-4)


def test_under_full_attention_the_cache_knows_its_padding() -> None:
    """Whether the second mask names all tokens, its own, or none, the first piece's padding stays unseen."""
    model, ids = with_memory(window_tokens=0), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    whole = model(ids, attention_mask=mask, use_cache=False).logits[:, 12:]
    for later in (mask, mask[:, 12:], None):
        cache = MemoryCache(model)
        model(ids[:, :12], attention_mask=mask[:, :12], cache=cache)
        logits = model(ids[:, 12:], attention_mask=later, cache=cache).logits
        torch.testing.assert_close(logits, whole, atol=2e-5, rtol=1e-4)
