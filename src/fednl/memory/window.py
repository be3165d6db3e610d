"""Attention over a window and re-based sinks, from stored positions: constant memory for any length.

A query sees the last `window_tokens` real tokens (itself included) and the first `sink_tokens` real tokens of
its row. A sink that has left the window is seen at rotary distance `min(t, sinks + window - 1) - j`, so that no
rotary distance ever exceeds the trained context. The result is the same in one pass, in pieces and token by
token. Source: sinks as in StreamingLLM, re-basing ours (docs/decisions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fednl.memory.pass_context import PassContext
from fednl.memory.rotary import Rotation, rotate, turning

BLOCK_TOKENS = 256
"""Queries are attended in blocks of this many when a pass is longer than two blocks."""


@dataclass
class Block:
    """Queries attended together, and what they may see; worked out once for all layers.

    Attributes:
        queries: which new tokens.
        slots: the slots that hold every token they see.
        size: how many new tokens.
        hidden: `[batch, 1, 1, queries, sinks + slots]` bool: what a query does not see; `None` if it sees all.
    """

    queries: slice
    slots: slice
    size: int
    hidden: Tensor | None


@dataclass
class WindowContext:
    """Positions, masks and rotations of one pass under a window. `slots` = cached tokens, then new ones.

    Attributes:
        tokens: how many the window holds.
        index: `[batch, tokens]` int64, each new token's index in its row; -1 for padding.
        padded: whether any slot is padding.
        positions: `[batch, slots]` int64, index of each slot's token in its row; -1 for padding.
        blocks: the queries, in order.
        sink_source: `[batch, sinks]` int64: which new token becomes this sink; -1 if it is cached or not there.
        rotations: the backbone's rotary embeddings, by kind of layer.
        retained: which slots stay: a count of last slots, or `[batch, window]` indices.
    """

    tokens: int
    index: Tensor
    padded: bool
    positions: Tensor
    blocks: list[Block]
    sink_source: Tensor | None
    rotations: dict[str, Rotation]
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
        if not self.padded:
            tokens = self.index.shape[1]
            first = slots.shape[1] - tokens - self.tokens
            none = min(tokens, max(0, -first))
            return torch.cat([torch.zeros_like(slots[:, :none]), slots[:, first + none : first + tokens]], 1)
        nobody = (self.gone < 0)[(...,) + (None,) * (slots.ndim - 2)]
        return _gather(slots, self.gone.clamp(min=0), 1).masked_fill(nobody, 0)

    @cached_property
    def gone(self) -> Tensor:
        """`[batch, tokens]` int64: the slot of the token that leaves as a new one comes; -1 where none does."""
        real = self.positions >= 0
        # The real slots of a row hold its last tokens in order, so counting them is counting tokens.
        rank = real.cumsum(1)
        slot = torch.arange(real.shape[1], device=real.device).expand_as(rank)
        of_rank = torch.full((real.shape[0], real.shape[1] + 1), -1, device=real.device)
        of_rank = of_rank.scatter(1, torch.where(real, rank, 0), slot)
        wanted = rank[:, real.shape[1] - self.index.shape[1] :] - self.tokens
        return torch.where((self.index >= 0) & (wanted > 0), of_rank.gather(1, wanted.clamp(min=0)), -1)

    def retained_positions(self) -> Tensor:
        """`[batch, window]`: the positions that go with `retain`."""
        if isinstance(self.retained, int):
            return self.positions[:, self.positions.shape[1] - self.retained :].clone()
        return self.positions.gather(1, self.retained)

    def sinks(self, new: Tensor, cached: Tensor | None) -> Tensor:
        """Merges cached sinks with those among the new tokens; both `[batch, heads, ..., head_dim]`."""
        if self.sink_source is None:
            return new[:, :, :0].clone() if cached is None else cached
        source = self.sink_source.clamp(min=0)[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
        fresh = new.gather(2, source)
        old = torch.zeros_like(fresh) if cached is None else cached
        return torch.where((self.sink_source >= 0)[:, None, :, None], fresh, old)


def window_context(
    ctx: PassContext,
    window: int,
    sinks: int,
    rotaries: Mapping[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]],
    like: Tensor,
) -> WindowContext:
    """Prepares masks and rotations for one pass.

    Args:
        ctx: the pass.
        window: `window_tokens`, at least 1.
        sinks: `sink_tokens`, at least 0.
        rotaries: the backbone's rotary embeddings, by kind of layer.
        like: any tensor of the backbone's dtype and device.
    """
    index, cache = ctx.index, ctx.cache
    cached = None if cache is None else cache.positions
    positions = index if cached is None else torch.cat([cached, index], dim=1)
    padded = ctx.keep is not None or (cache is not None and cache.has_padding)
    slot = torch.arange(sinks, device=index.device)
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
        blocks=_blocks(index, positions, slot, window, not padded or contiguous(positions)),
        sink_source=source,
        rotations={
            kind: Rotation(turning(*embed(like, rebased)), turning(*embed(like, slot.unsqueeze(0))))
            for kind, embed in rotaries.items()
        },
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
    rotation: Rotation | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention over sinks and window; query heads share the KV head of their group.

    Args:
        query: rotated, `[batch, heads, tokens, head_dim]`.
        key, value: rotated keys and values of all slots, `[batch, kv_heads, slots, head_dim]`.
        query_raw: the query before rotary embedding, same shape as `query`.
        sink_key: sinks before rotary embedding, `[batch, kv_heads, sinks, head_dim]`.
        sink_value: their values.
        window: the pass's positions and masks.
        rotation: the layer's rotary embedding, or `None` in a layer without.
        scaling: factor on the scores.
        dropout: share of the weights that is dropped, the backbone's own while it trains.
        softcap: scores are bent by tanh so that none exceeds it; `None` for not at all.

    Returns:
        `[batch, tokens, heads, head_dim]`, in `query`'s dtype; the softmax is computed in float32.
    """
    batch, heads, _, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    rebased = query_raw
    if rotation is not None:
        rebased, sink_key = rotate(query_raw, rotation.query), rotate(sink_key, rotation.sink)
    outputs = []
    for block in window.blocks:
        size = block.size

        def grouped(x: Tensor, block: Block = block, size: int = size) -> Tensor:
            return x[:, :, block.queries].reshape(batch, kv_heads, group * size, head_dim)

        scores = torch.cat(
            [
                grouped(rebased) @ sink_key.transpose(2, 3),
                grouped(query) @ key[:, :, block.slots].transpose(2, 3),
            ],
            dim=-1,
        )
        scores = scores.view(batch, kv_heads, group, size, -1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scaling
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        if block.hidden is not None:
            scores = scores.masked_fill(block.hidden, torch.finfo(torch.float32).min)
        weights = scores.softmax(-1).to(value.dtype).view(batch, kv_heads, group * size, -1)
        if dropout:
            weights = nn.functional.dropout(weights, dropout)
        out = weights @ torch.cat([sink_value, value[:, :, block.slots]], dim=2)
        outputs.append(out.view(batch, heads, size, head_dim))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)).transpose(1, 2)


def _gather(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Picks along `dim` by `index [batch, picked]`, the same for everything else."""
    shape = [1] * x.ndim
    shape[0], shape[dim] = index.shape
    sizes = list(x.shape)
    sizes[dim] = index.shape[1]
    return x.gather(dim, index.view(shape).expand(sizes))


def _blocks(index: Tensor, positions: Tensor, sink: Tensor, window: int, contiguous: bool) -> list[Block]:
    """Cuts a long pass into blocks, so that time and memory grow with its length and not with its square."""
    tokens, slots = index.shape[1], positions.shape[1]
    in_blocks = contiguous and tokens > 2 * BLOCK_TOKENS
    size, past = BLOCK_TOKENS if in_blocks else tokens, slots - tokens
    blocks = []
    for start in range(0, tokens, size):
        queries = slice(start, min(start + size, tokens))
        near = slice(max(0, past + start - window + 1) if contiguous else 0, past + queries.stop)
        token, there = index[:, queries].unsqueeze(2), positions[:, near].unsqueeze(1)
        distance = token - there
        seen = torch.cat([sink <= token - window, (distance >= 0) & (distance < window) & (there >= 0)], dim=2)
        hidden, count = ~seen[:, None, None], queries.stop - queries.start
        sees_all = count == 1 and not bool(hidden.any())  # as it is from token to token, once the window is full
        blocks.append(Block(queries, near, count, None if sees_all else hidden))
    return blocks


def contiguous(positions: Tensor) -> bool:
    """True if each row's real tokens stand side by side, so that slot distance is token distance."""
    real = positions >= 0
    return bool(((real[:, 1:] != real[:, :-1]).sum(1) <= 1 + (~real[:, :1]).int().sum(1)).all())
