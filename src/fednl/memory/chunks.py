"""Chunks of an update rule with decay, momentum or neither: many tokens solved at once.

The residual of token t, times its strength, is what it writes: u_t. Decay and momentum are numbers, so they pass
through products of matrices, and within a chunk

    S_t = r_t S_0 + h_t P_0 + sum_{j <= t} G_tj k_j u_j^T

where S_0 and P_0 are state and momentum at the chunk's start. With the decays A_ij = exp(sum of log_decay over (j, i])
for j <= i and else 0, r_t = exp(sum over [0, t]), and E, e the same of the log momentum:

    G = A, h = 0 without momentum;   G = A E, h = A e with it (columns of A are 0 at tokens not kept).

u solves the triangular system that the residuals `v_t - S_(t-1)^T k_t` make, with G, r, h one row up. The Hebbian rule
has u = beta v. No factor is ever divided by, and each is at most a sum of products of numbers in [0, 1].
Plain autograd; time and memory grow linearly with the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fednl.memory.arguments import FORGET, autocast_off, unflatten
from fednl.memory.delta_chunks import intervals, token_rows
from fednl.memory.rules_reference import Given, Memory


class _Shares(NamedTuple):
    """How much of what was written before is in a state, for every token of every chunk."""

    writes: Tensor  # [..., C, C]: G
    start: Tensor  # [..., C, 1]: r
    moved: Tensor | None  # [..., C, 1]: h
    momentum: tuple[Tensor, Tensor] | None  # the last rows of E [..., C] and e [..., 1]: what the momentum holds

    def before(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """G, r and h of the state each token finds: one row up, the first of the chunk's start itself."""
        down = (0, 0, 1, -1)
        moved = None if self.moved is None else F.pad(self.moved, down)
        return F.pad(self.writes, down), F.pad(self.start, down, value=1.0), moved


def by_chunk(given: Given, chunk: int, residual: bool = True) -> tuple[Tensor, Memory]:
    """The chunked form; below, [...] stands for [chunks, batch, kv_heads] and G for query heads per KV head."""
    heads = given.k.shape[2]
    with autocast_off(given.k.device):
        given = _without_pads(given)
        keys, values = (token_rows(x, heads, chunk)[:, :, :, 0] for x in (given.k, given.v))
        strength = token_rows(given.beta.unsqueeze(-1), heads, chunk)[:, :, :, 0]
        queries = token_rows(given.q.to(given.dtype), heads, chunk)
        shares = _shares(given, chunk)
        if residual:
            fixed, *reached = _solved(keys, values, strength, shares)
        else:
            fixed, reached = strength * values, []
        written, states, momenta, memory = _run(keys, fixed, reached, shares, given)
        scores = queries @ keys.mT.unsqueeze(3) * shares.writes.unsqueeze(-3)
        out = scores @ written.unsqueeze(3) + (queries * shares.start.unsqueeze(-3)) @ states.unsqueeze(3)
        if momenta is not None and shares.moved is not None:
            out = out + (queries * shares.moved.unsqueeze(-3)) @ momenta.unsqueeze(3)
        tokens = out.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, : given.k.shape[1]]
        return tokens.to(given.q.dtype), memory


def _without_pads(given: Given) -> Given:
    """Lets a pad neither write nor scale anything."""
    if given.keep is None:
        return given
    pads = ~given.keep.unsqueeze(-1)
    rows = (None if x is None else x.masked_fill(pads, 0.0) for x in (given.beta, given.log_decay, given.log_momentum))
    beta, log_decay, log_momentum = rows
    assert beta is not None
    return given._replace(beta=beta, log_decay=log_decay, log_momentum=log_momentum)


def _shares(given: Given, chunk: int) -> _Shares:
    decays, start = _products(given.log_decay, given, chunk)
    if given.log_momentum is None:
        return _Shares(decays, start, None, None)
    carried, left = _products(given.log_momentum, given, chunk)
    real = torch.ones_like(given.beta)
    if given.keep is not None:
        real = given.keep.unsqueeze(-1).expand_as(given.beta).to(given.dtype)
    columns = decays * token_rows(real.unsqueeze(-1), given.k.shape[2], chunk)[:, :, :, 0].mT
    return _Shares(columns @ carried, start, columns @ left, (carried[..., -1, :], left[..., -1, :]))


def _products(log: Tensor | None, given: Given, chunk: int) -> tuple[Tensor, Tensor]:
    """The factors' products over (j, i], [..., C, C] for j <= i and else 0, and over [0, i], [..., C, 1]."""
    if log is None:
        ones = given.k.new_ones(chunk, chunk)
        return ones.tril(), ones[:, :1]
    logs = token_rows(log.clamp(min=FORGET).unsqueeze(-1), given.k.shape[2], chunk)[:, :, :, 0, :, 0]
    between, until = intervals(chunk, logs)
    return unflatten((logs @ between).exp(), -1, chunk).tril(), (logs @ until).exp().unsqueeze(-1)


def _solved(keys: Tensor, values: Tensor, strength: Tensor, shares: _Shares) -> list[Tensor]:
    """Solves for the writes: their part [..., C, value_dim] that needs no state, then what they take off each state.

    The second, [..., C, key_dim], times the state at the chunk's start is taken off; the third, with momentum, times
    the momentum there.
    """
    writes, start, moved = shares.before()
    sides = [values, keys * start] if moved is None else [values, keys * start, keys * moved]
    solved = torch.linalg.solve_triangular(
        strength * (keys @ keys.mT) * writes, strength * torch.cat(sides, -1), upper=False, unitriangular=True
    )
    return list(solved.split([side.shape[-1] for side in sides], -1))


def _run(
    keys: Tensor, fixed: Tensor, reached: list[Tensor], shares: _Shares, given: Given
) -> tuple[Tensor, Tensor, Tensor | None, Memory]:
    """Goes from chunk to chunk: all writes, state and momentum at each chunk's start, and what is left at the end.

    Chunks are taken apart once, not indexed one by one, which would make the backward pass quadratic.
    """
    state, momentum = given.state, given.momentum
    chunks, last = keys.shape[0], shares.writes[..., -1, :].unsqueeze(-1)
    carried = (keys * last).mT.unbind(0)
    factors = [_per_chunk(shares.start[..., -1:, :], chunks)]
    if shares.moved is not None and shares.momentum is not None:
        held, left = shares.momentum
        factors += [_per_chunk(x, chunks) for x in (shares.moved[..., -1:, :], left.unsqueeze(-1))]
        pushed = (keys * held.unsqueeze(-1)).mT.unbind(0)
    parts = [x.unbind(0) for x in reached]
    written, states, momenta = [], [], []
    for n, here in enumerate(fixed.unbind(0)):
        states.append(state)
        write = here - parts[0][n] @ state if parts else here
        after = factors[0][n] * state
        if momentum is not None:
            momenta.append(momentum)
            write = write - parts[1][n] @ momentum
            after = after + factors[1][n] * momentum
            momentum = factors[2][n] * momentum + pushed[n] @ write
        state = after + carried[n] @ write
        written.append(write)
    starts = None if momentum is None else torch.stack(momenta)
    return torch.stack(written), torch.stack(states), starts, Memory(state, momentum)


def _per_chunk(factor: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """A factor of every chunk, or one of all, as one tensor a chunk."""
    return factor.unbind(0) if factor.ndim > 2 else (factor,) * chunks
