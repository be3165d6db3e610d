"""What came just before a token, as one vector: an exponential average over the real tokens of a row.

A fact and a question about it seldom share a token at the place that matters (the value, the word "Answer:"),
but they share the words before it. Averaged over the tokens before, the keys of both places are alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_TOKENS = 256


def smear(x: Tensor, log_decay: Tensor, keep: Tensor | None, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes `c_t = exp(log_decay) c_(t-1) + x_t` over the real tokens; padding leaves c as it is.

    Time and memory are linear in the tokens. Nothing is changed in place.

    Args:
        x: `[batch, tokens, heads, dim]`.
        log_decay: `[heads]`, at most 0; finite, for a decay that rounds to 0 has no logarithm.
        keep: `[batch, tokens]` bool, False for padding; `None` if all is real.
        carry: c before the first token, `[batch, heads, dim]`; `None` for zero.

    Returns:
        c at every token, as `x`; and c after the last one, as `carry`.

    Source: ours; a causal average as RWKV's token shift (arXiv 2305.13048) and TPTT's pooling use, with learned decay.
    """
    batch, tokens, heads, dim = x.shape
    state = x.new_zeros(batch, heads, dim) if carry is None else carry.to(x.dtype)
    real = x.new_ones(1, tokens) if keep is None else keep.to(x.dtype)
    parts = []
    for start in range(0, tokens, BLOCK_TOKENS):
        here = real[:, start : start + BLOCK_TOKENS]
        count = here.cumsum(1)
        apart = count.unsqueeze(2) - count.unsqueeze(1)
        seen = here.unsqueeze(1) * torch.ones_like(apart).tril()
        log = log_decay[None, :, None, None]
        weights = (apart.clamp(min=0).unsqueeze(1) * log).exp() * seen.unsqueeze(1)
        rows = x[:, start : start + BLOCK_TOKENS].transpose(1, 2)
        old = (count[:, None, :, None] * log).exp() * state.unsqueeze(2)
        part = weights @ rows + old
        state = part[:, :, -1].clone()  # a view would keep the whole block alive in the cache
        parts.append(part.transpose(1, 2))
    return (torch.cat(parts, 1) if parts else x), state


def before(c: Tensor, carry: Tensor | None) -> Tensor:
    """Shifts `c [batch, tokens, heads, dim]` by one token: what was there before each token came."""
    first = torch.zeros_like(c[:, :1]) if carry is None else carry.to(c.dtype).unsqueeze(1)
    return torch.cat([first, c[:, :-1]], 1)
