"""How strongly a layer writes: the write strength, and a rule's own decay and momentum, all from the layer's input."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednl.memory.settings import MemoryConfig

DECAY_AT_START = 0.999
MOMENTUM_AT_START = 0.1
INNER_DEVIATION = 0.02


class Affine(nn.Module):
    """`weight x + bias`, with a rank `up (down x) + bias`, or with no inputs the bias alone.

    Not an `nn.Linear`, so that PEFT's "all-linear" does not wrap a rule. At the start weight and `up` are 0.

    Args:
        inputs, outputs: widths.
        bias: the number that every bias begins with.
        rank: the inner size of the two factors; 0 for one full matrix.
        generator: draws `down`; read only with a rank.
    """

    def __init__(
        self, inputs: int, outputs: int, bias: float, rank: int = 0, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.weight = self.down = self.up = None
        if inputs and rank:
            self.down = nn.Parameter(torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs))
            self.up = nn.Parameter(torch.zeros(outputs, rank))
        elif inputs:
            self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = nn.Parameter(torch.full((outputs,), bias))

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., inputs]` -> `[..., outputs]`, without inputs `[outputs]`; in `x`'s dtype."""
        bias = self.bias.to(x.dtype)
        if self.down is not None and self.up is not None:
            return F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype), bias)
        return bias if self.weight is None else F.linear(x, self.weight.to(x.dtype), bias)


class Strengths(NamedTuple):
    """How strongly tokens are written, and what becomes of what was there; `[batch, tokens, writes * kv_heads]` each.

    Attributes:
        beta: the write strengths.
        log_decay, log_momentum: logarithms of the factors on state and momentum, 0 for all writes of a token but the
            first; `None` where the rule has none.
        real: 1 for a token, 0 for padding; `None` where the rule needs no telling (momentum and inner models do).
    """

    beta: Tensor
    log_decay: Tensor | None = None
    log_momentum: Tensor | None = None
    real: Tensor | None = None


class Write(Affine):
    """The group `write`: a write strength `range sigmoid(W x + b)` per KV head and write, and the rule's own factors.

    A rule that decays has `decay`, a factor `sigmoid(W x + b)` per KV head and token. One with momentum has `momentum`,
    a factor eta per KV head, `sigmoid` of a learned number; its strengths are multiplied by (1 - eta)^2, so that no
    keys can make the state swing up (see `titans_rule`).
    At the start W = 0; every write has strength `config.write_start` (with momentum 0.81 of it), the decay's factor is
    0.999 (half is left after 700 tokens) and eta is 0.1, so that each rule begins near the delta rule.

    Args:
        hidden: width of the residual stream.
        kv_heads: key/value heads.
        config: the memory settings.
        inner: where the rule has an inner model, what it begins with.
        generator: draws the factors of `config.write_rank`, which W is a product of where that is not 0.

    Source: sigmoid decays from the data as in Titans (arXiv 2501.00663) and Gated DeltaNet (arXiv 2412.06464); one
    momentum for all tokens, the scaling, the low rank and all starts are ours.
    """

    def __init__(
        self,
        hidden: int,
        kv_heads: int,
        config: MemoryConfig,
        inner: Inner | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        rule, share, rank = config.update_rule, config.write_start / config.write_range, config.write_rank
        super().__init__(hidden, config.writes * kv_heads, logit(share), rank, generator)
        self.range, self.writes = config.write_range, config.writes
        self.decay = Affine(hidden, kv_heads, logit(DECAY_AT_START), rank, generator) if rule.decays else None
        start = torch.full((kv_heads,), logit(MOMENTUM_AT_START))
        self.momentum = nn.Parameter(start) if rule.momentum else None
        self.inner = inner

    def strengths(self, x: Tensor, keep: Tensor | None) -> Strengths:
        """`x [batch, tokens, hidden]` -> the strengths; where `keep [batch, tokens]` is False they change nothing."""
        real = None if keep is None else keep.unsqueeze(-1)
        beta = torch.sigmoid(self(x))
        if self.range != 1:
            beta = self.range * beta
        if real is not None:
            beta = beta * real
        decay = None if self.decay is None else self._log(self.decay(x), real)
        if self.momentum is None and self.inner is None:
            return Strengths(beta, decay)
        told = torch.ones_like(beta) if real is None else real.expand_as(beta).to(beta.dtype)
        if self.momentum is None:
            return Strengths(beta, decay, None, told)
        momentum = self.momentum.to(x.dtype)
        beta = beta * torch.sigmoid(-momentum).square()
        return Strengths(beta, decay, self._log(momentum.expand_as(beta), real), told)

    def _log(self, logits: Tensor, real: Tensor | None) -> Tensor:
        """The factor's logarithm, `[batch, tokens, kv_heads]` logits -> 0 for all writes of a token but the first."""
        log = F.logsigmoid(logits)
        if real is not None:
            log = log * real
        return F.pad(log, (0, (self.writes - 1) * log.shape[-1]))


class Inner(nn.Module):
    """What TTT-Linear's inner model begins with, and its layer norm; part of the group `write`.

    Args:
        kv_heads: key/value heads; each has a model of its own.
        head_dim: width of a head.
        generator: draws the weights, normal with deviation 0.02; bias and shift begin at 0, the scale at 1.

    Source: Sun et al. 2024 (arXiv 2407.04620), section 2.7: the start is learned as every other weight is.
    """

    def __init__(self, kv_heads: int, head_dim: int, generator: torch.Generator) -> None:
        super().__init__()
        weights = INNER_DEVIATION * torch.randn(kv_heads, head_dim, head_dim, generator=generator)
        self.start = nn.Parameter(F.pad(weights, (0, 0, 0, 1)))
        self.scale = nn.Parameter(torch.ones(kv_heads, head_dim))
        self.shift = nn.Parameter(torch.zeros(kv_heads, head_dim))


def logit(share: float) -> float:
    """The number whose sigmoid is `share`, which lies above 0 and below 1."""
    return math.log(share / (1 - share))
