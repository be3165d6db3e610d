"""What a value is stored under and asked for by: the words just before it, weighted by how much each one tells.

A fact and a question about it seldom share a token at the place that matters (the value, the word "Answer:"),
but they share the words before it, names and numbers above all. An address is the running average of one early
layer's inputs in which a learned weight lets names in and leaves phrases that every fact shares out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednl.memory.precision import Spared
from fednl.memory.smear import before, smear
from fednl.memory.write import logit

DECAY_AT_START = 0.85
WEIGHT_AT_START = -1.0
FLOOR = 1e-2
"""Added to the squared length of an average: one that has faded is a short address, and writes little."""


class Addresses(Spared):
    """The addresses of every token, for all memory layers alike; the rules of the group `address`.

    With x the layer's input less `centre`, times `scale`, and per KV head h:
    `c_t = decay_h c_(t-1) + sigmoid(pick_h x_t + pick_bias_h) P_h x_t`. A query is `c_t`, a key `c_(t-1)`, each divided
    by `sqrt(|c|^2 + 0.01)`. The projection P is `weight`, or `up down` of a lower rank.

    Args:
        hidden: width of the residual stream.
        kv_heads: heads with an address of their own.
        head_dim: width of an address.
        rank: rank of the projection; 0 for a full matrix.
        generator: draws the projection.

    Source: ours (docs/decisions/0017; docs/log.md has the measurements). Running averages of inputs as keys are
    known from token shift (RWKV, arXiv 2305.13048); the learned weight and the sharing over layers are ours.
    """

    def __init__(self, hidden: int, kv_heads: int, head_dim: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.centre = nn.Parameter(torch.zeros(hidden))
        self.scale = nn.Parameter(torch.ones(1))
        size = kv_heads * head_dim
        if rank:
            self.down = nn.Parameter(torch.randn(rank, hidden, generator=generator) / math.sqrt(hidden))
            self.up = nn.Parameter(torch.randn(size, rank, generator=generator) / math.sqrt(rank))
        else:
            self.weight = nn.Parameter(torch.randn(size, hidden, generator=generator) / math.sqrt(hidden))
        self.pick = nn.Parameter(torch.zeros(kv_heads, hidden))
        self.pick_bias = nn.Parameter(torch.full((kv_heads,), WEIGHT_AT_START))
        self.decay = nn.Parameter(torch.full((kv_heads,), logit(DECAY_AT_START)))

    def forward(self, source: Tensor, keep: Tensor | None, carry: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Computes every token's query and key.

        Args:
            source: the address layer's input after its norm, `[batch, tokens, hidden]`.
            keep: `[batch, tokens]` bool, False for padding, which leaves the average as it is; `None` if all is real.
            carry: the average before the first token, `[batch, kv_heads, head_dim]`; `None` for zero.

        Returns:
            Queries and keys `[batch, tokens, kv_heads, head_dim]`, and the average after the last token.
        """
        x = (source.to(torch.promote_types(self.centre.dtype, torch.float32)) - self.centre) * self.scale
        weight = torch.sigmoid(F.linear(x, self.pick, self.pick_bias))
        words = self._projected(x).view(*x.shape[:2], self.kv_heads, -1)
        average, after = smear(words * weight.unsqueeze(-1), F.logsigmoid(self.decay), keep, carry)
        return _scaled(average), _scaled(before(average, carry)), after

    def _projected(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down), self.up) if hasattr(self, "down") else F.linear(x, self.weight)


def _scaled(average: Tensor) -> Tensor:
    """Scales the last dimension to length 1, or to less where it is short."""
    return average * torch.rsqrt(average.square().sum(-1, keepdim=True) + FLOOR)
