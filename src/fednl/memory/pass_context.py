"""What every layer of one forward pass shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from fednl.memory.cache import MemoryCache
    from fednl.memory.packed import Packing
    from fednl.memory.window import WindowContext


@dataclass
class Call:
    """A causal model's call around the passes of its decoder.

    Attributes:
        last_only: whether it asks for the logits of the last position alone (`logits_to_keep = 1`), as `generate` does.
        passes: what is left for it to commit.
    """

    last_only: bool = False
    passes: list[PassContext] = field(default_factory=list)


@dataclass
class PassContext:
    """What every layer of one forward pass shares.

    Attributes:
        index: `[batch, tokens]` int64, each new token's index among its row's real tokens; -1 for padding.
        keep: `[batch, tokens]` bool, False for padding, or `None` if every token is real.
        cache: the conversation this pass goes on with, or `None`.
        window: the window part, or `None` with `window_tokens = 0`.
        source: the address layer's input after its norm, once it was reached, without its history of gradients, so
            that a recomputed layer sees what it saw; `None` with `keys = "token"`.
        addressed: what the addresses went on from and came to, once a layer without gradients has made them.
        counts: `[batch]` int64, real tokens of each row after this pass.
        gate_scale: multiplies every gate; as it was when the pass began.
        call: the call around the pass, which commits it; `None` if there is none.
        packing: where the caller had several documents in a row, or `None`; here they have a row each.
        last: `[batch]` int64, the slot of each of the caller's rows whose output stands for the last one, because
            padding follows it and the call asks for the last alone; `None` if the last itself does.
        ends: `[batch, 2]` int64, as in `MemoryCache`, or `None`.
        sums: by layer, what `fednl.memory.finite` looks at when the pass ends.
    """

    index: Tensor
    keep: Tensor | None
    cache: MemoryCache | None
    counts: Tensor
    gate_scale: float = 1.0
    call: Call | None = None
    packing: Packing | None = None
    last: Tensor | None = None
    ends: Tensor | None = None
    window: WindowContext | None = None
    source: Tensor | None = None
    addressed: tuple[Tensor | None, tuple[Tensor, Tensor, Tensor]] | None = None
    sums: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
