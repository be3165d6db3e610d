"""Attention over a window and re-based sinks, from stored positions: constant memory for any length.

A query sees the last `window_tokens` real tokens (itself included) and the first `sink_tokens` real tokens of
its row. A sink that has left the window is seen at rotary distance `min(t, sinks + window - 1) - j`, so that no
rotary distance ever exceeds the trained context. The result is the same in one pass, in pieces and token by
token. Source: sinks as in StreamingLLM, re-basing ours (docs/decisions).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fednl.memory.cache import MemoryCache

BLOCK_TOKENS = 256
"""Queries are attended in blocks of this many when a pass is longer than two blocks."""


@dataclass
class PassContext:
    """What every layer of one forward pass shares.

    Attributes:
        index: `[batch, tokens]` int64, each new token's index among its row's real tokens; -1 for padding.
        keep: `[batch, tokens]` bool, False for padding, or `None` if every token is real.
        cache: the conversation this pass goes on with, or `None`.
        window: the window part, or `None` with `window_tokens = 0`.
        counts: `[batch]` int64, real tokens of each row after this pass.
    """

    index: Tensor
    keep: Tensor | None
    cache: MemoryCache | None
    counts: Tensor
    window: WindowContext | None = None


@dataclass
class WindowContext:
    """Positions, masks and rotations of one pass under a window. `slots` = cached tokens, then new ones.

    Attributes:
        tokens: how many the window holds.
        index: `[batch, tokens]` int64, each new token's index in its row; -1 for padding.
        padded: whether any slot is padding.
        positions: `[batch, slots]` int64, index of each slot's token in its row; -1 for padding.
        allowed: `[batch, tokens, slots]` bool, or `None` when the pass goes in blocks (`banded`).
        sinks_allowed: `[batch, tokens, sinks]` bool: the sinks that left this query's window.
        sink_source: `[batch, sinks]` int64: which new token becomes this sink; -1 if it is cached or not there.
        query_rotation, sink_rotation: (cos, sin) of the re-based queries and of the sinks.
        retained: which slots stay: a count of last slots, or `[batch, window]` indices.
    """

    tokens: int
    index: Tensor
    padded: bool
    positions: Tensor
    allowed: Tensor | None
    sinks_allowed: Tensor
    sink_source: Tensor | None
    query_rotation: tuple[Tensor, Tensor]
    sink_rotation: tuple[Tensor, Tensor]
    retained: int | Tensor

    def retain(self, slots: Tensor, dim: int = 2) -> Tensor:
        """Keeps the window's part of a tensor whose dimension `dim` is the slots, padding first."""
        if isinstance(self.retained, int):
            cut = slots.shape[dim] - self.retained
            return slots.narrow(dim, cut, self.retained).clone() if cut else slots
        return _gather(slots, self.retained, dim)

    def leaving(self, slots: Tensor) -> Tensor:
        """For every new token, what the token holds that leaves the window as it comes; zeros where none does.

        `slots [batch, slots, ...]` -> `[batch, tokens, ...]`.
        """
        tokens = self.index.shape[1]
        if isinstance(self.retained, int) and not self.padded:
            none = min(tokens, max(0, self.tokens + tokens - slots.shape[1]))
            first = slots.shape[1] - tokens - self.tokens + none
            gone = slots[:, first : first + tokens - none]
            return torch.cat([slots.new_zeros(slots.shape[0], none, *slots.shape[2:]), gone], 1)
        wanted = torch.where(self.index >= 0, self.index - self.tokens, -1)
        match = (wanted.unsqueeze(2) == self.positions.unsqueeze(1)) & (wanted >= 0).unsqueeze(2)
        there = match.any(-1)
        found = _gather(slots, match.int().argmax(-1), 1)
        return torch.where(there[(...,) + (None,) * (slots.ndim - 2)], found, torch.zeros_like(found))

    def retained_positions(self) -> Tensor:
        """`[batch, window]`: the positions that go with `retain`."""
        if isinstance(self.retained, int):
            return self.positions[:, self.positions.shape[1] - self.retained :]
        return self.positions.gather(1, self.retained)

    def sinks(self, new: Tensor, cached: Tensor | None) -> Tensor:
        """Merges cached sinks with those among the new tokens; both `[batch, heads, ..., head_dim]`."""
        if self.sink_source is None:
            return new[:, :, :0] if cached is None else cached
        source = self.sink_source.clamp(min=0)[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
        fresh = new.gather(2, source)
        old = torch.zeros_like(fresh) if cached is None else cached
        return torch.where((self.sink_source >= 0)[:, None, :, None], fresh, old)


def window_context(ctx: PassContext, window: int, sinks: int, rotary: Any, like: Tensor) -> WindowContext:
    """Prepares masks and rotations for one pass.

    Args:
        ctx: the pass.
        window: `window_tokens`, at least 1.
        sinks: `sink_tokens`, at least 0.
        rotary: the backbone's rotary embedding module.
        like: any tensor of the backbone's dtype and device.
    """
    index, cache = ctx.index, ctx.cache
    tokens = index.shape[1]
    cached = None if cache is None else cache.positions
    positions = index if cached is None else torch.cat([cached, index], dim=1)
    padded = ctx.keep is not None or (cache is not None and cache.has_padding)
    banded = tokens > 2 * BLOCK_TOKENS and (not padded or (cached is None and _contiguous(ctx)))
    slot = torch.arange(sinks, device=index.device)
    sinks_allowed = (slot <= index.unsqueeze(-1) - window) & (index.unsqueeze(-1) >= 0)
    old_counts = ctx.counts - (index >= 0).sum(1)
    source: Tensor | None = None
    if sinks and (cache is None or cache.counts is None or bool((old_counts < sinks).any())):
        here = index.unsqueeze(1) == slot[None, :, None]
        source = torch.where(here.any(-1), here.int().argmax(-1), -1)
    rebased = index.clamp(min=0, max=sinks + window - 1)
    retained: int | Tensor = min(window, positions.shape[1])
    if padded and positions.shape[1] > window:
        retained = torch.argsort((positions >= 0).int(), dim=1, stable=True)[:, -window:]
    return WindowContext(
        tokens=window,
        index=index,
        padded=padded,
        positions=positions,
        allowed=None if banded else _visible(index, positions, window),
        sinks_allowed=sinks_allowed,
        sink_source=source,
        query_rotation=rotary(like, rebased),
        sink_rotation=rotary(like, slot.unsqueeze(0)),
        retained=retained,
    )


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_raw: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    window: WindowContext,
    scaling: float,
) -> Tensor:
    """Softmax attention over sinks and window; query heads share the KV head of their group.

    Args:
        query: rotated, `[batch, heads, tokens, head_dim]`.
        key, value: rotated keys and values of all slots, `[batch, kv_heads, slots, head_dim]`.
        query_raw: the query before rotary embedding, same shape as `query`.
        sink_key: sinks before rotary embedding, `[batch, kv_heads, sinks, head_dim]`.
        sink_value: their values.
        window: the pass's positions and masks.
        scaling: factor on the scores.

    Returns:
        `[batch, tokens, heads, head_dim]`, in `query`'s dtype; the softmax is computed in float32.
    """
    batch, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    rebased = rotate(query_raw, window.query_rotation)
    sink_key = rotate(sink_key, window.sink_rotation)
    past = key.shape[2] - tokens
    block = tokens if window.allowed is not None else BLOCK_TOKENS
    outputs = []
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        first = 0 if window.allowed is not None else max(0, past + start - window.tokens + 1)
        last = past + stop
        if window.allowed is not None:
            allowed = window.allowed
        else:
            allowed = _visible(window.positions[:, past + start : last], window.positions[:, first:last], window.tokens)
        allowed = torch.cat([window.sinks_allowed[:, start:stop], allowed], dim=-1)[:, None, None]

        def grouped(x: Tensor, start: int = start, stop: int = stop) -> Tensor:
            return x[:, :, start:stop].reshape(batch, kv_heads, group * (stop - start), head_dim)

        scores = torch.cat(
            [
                grouped(rebased) @ sink_key.transpose(2, 3),
                grouped(query) @ key[:, :, first:last].transpose(2, 3),
            ],
            dim=-1,
        )
        scores = scores.view(batch, kv_heads, group, stop - start, -1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scaling
        scores = scores.masked_fill(~allowed, torch.finfo(torch.float32).min)
        weights = scores.softmax(-1).to(value.dtype).view(batch, kv_heads, group * (stop - start), -1)
        out = weights @ torch.cat([sink_value, value[:, :, first:last]], dim=2)
        outputs.append(out.view(batch, heads, stop - start, head_dim))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Applies a rotary embedding (half-split layout) to `x [batch, heads, tokens, head_dim]`."""
    cos, sin = (part.unsqueeze(1) for part in rotation)
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def _gather(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Picks along `dim` by `index [batch, picked]`, the same for everything else."""
    shape = [1] * x.ndim
    shape[0], shape[dim] = index.shape
    sizes = list(x.shape)
    sizes[dim] = index.shape[1]
    return x.gather(dim, index.view(shape).expand(sizes))


def _visible(query: Tensor, slots: Tensor, window: int) -> Tensor:
    """`[batch, tokens, slots]`: real slots at distance 0 to `window - 1` before the query."""
    distance = query.unsqueeze(2) - slots.unsqueeze(1)
    return (distance >= 0) & (distance < window) & (slots >= 0).unsqueeze(1)


def _contiguous(ctx: PassContext) -> bool:
    """True if each row's real tokens stand side by side, so that slot distance is token distance."""
    real = ctx.index >= 0
    return bool(((real[:, 1:] != real[:, :-1]).sum(1) <= 1 + (~real[:, :1]).int().sum(1)).all())
