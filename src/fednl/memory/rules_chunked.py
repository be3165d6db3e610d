"""The update rules beside the delta rule, chunk by chunk: the same results as their references, faster.

The implicit delta rule and DeltaProduct are the delta rule on other numbers and use its chunked form. The others have a
chunked form of their own. The residual of token t, times its strength, is what it writes: u_t. Decay and momentum are
numbers, so they pass through products of matrices, and within a chunk

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

from fednl.memory.operator import FORGET, RECURRENCE_TOKENS, autocast_off, delta_rule, intervals, token_rows, unflatten
from fednl.memory.rules_reference import (
    Given,
    Memory,
    check_writes,
    checked,
    decay_separate_reference,
    hebbian_reference,
    titans_reference,
)


def implicit_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    state: Tensor | None = None,
    chunk_tokens: int = 32,
) -> tuple[Tensor, Tensor]:
    """Writes and reads a memory whose every write is the exact minimum of a proximal objective.

    Token t moves the state S to the minimum of `|S^T k - v|^2 / 2 + |S - S_(t-1)|^2 / (2 beta)`, which is a delta
    write of strength `beta / (1 + beta |k|^2)`. Stable for every key and every beta.

    Args:
        q, k, v, state, chunk_tokens: as in `delta_rule`.
        beta: Write strength, [batch, tokens, kv_heads], at least 0 and without upper bound. A pad has 0.

    Returns:
        As `delta_rule`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, beta is negative, or chunk_tokens is below 1.

    Source: FedNL (arXiv 2605.16350) equation 2; Nested Learning (arXiv 2512.24695) equations 56 and 57.
    """
    given = checked(q, k, v, beta, state=state)
    with autocast_off(k.device):
        rate = given.beta / (1 + given.beta * given.k.square().sum(-1))
    return delta_rule(q, k, v, rate, state=state, chunk_tokens=chunk_tokens)


def delta_product_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    chunk_tokens: int = 32,
) -> tuple[Tensor, Tensor]:
    """Writes and reads a memory into which every token writes several times.

    A token decays the state once, makes its delta writes in order, and reads after the last. It costs as much as
    `delta_rule` on that many times the tokens.

    Args:
        q, state: as in `delta_rule`.
        k: Keys, [batch, tokens, writes, kv_heads, key_dim].
        v: Values, [batch, tokens, writes, kv_heads, value_dim].
        beta: Write strengths, [batch, tokens, writes, kv_heads], at least 0; stable as in `delta_rule`. A pad has 0.
        log_decay: as in `delta_rule`, once per token.
        chunk_tokens: Writes solved at once, at least 1. Changes the speed, not the result.

    Returns:
        As `delta_rule`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, beta is negative, log_decay is positive, or
            chunk_tokens is below 1.

    Source: DeltaProduct (arXiv 2502.10297).
    """
    check_writes(k, v, beta)
    checked(q, k[:, :, 0], v[:, :, 0], beta[:, :, 0], log_decay=log_decay, state=state)
    writes = k.shape[2]
    first, last = (0, writes - 1), (writes - 1, 0)
    decays = None if log_decay is None else F.pad(log_decay.unsqueeze(2), (0, 0, *first)).flatten(1, 2)
    asked = F.pad(q.unsqueeze(2), (0, 0, 0, 0, *last)).flatten(1, 2)
    rows = [x.flatten(1, 2) for x in (k, v, beta)]
    out, memory = delta_rule(asked, *rows, log_decay=decays, state=state, chunk_tokens=chunk_tokens)
    return out[:, writes - 1 :: writes], memory


def hebbian_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    state: Tensor | None = None,
    chunk_tokens: int = 32,
) -> tuple[Tensor, Tensor]:
    """Writes and reads a memory that adds every value under its key and takes nothing away: linear attention.

    What is written twice is recalled twice as strongly, and the state grows with every write.

    Args:
        q, k, v, state, chunk_tokens: as in `delta_rule`.
        beta: Write strength, [batch, tokens, kv_heads], at least 0. A pad has 0.

    Returns:
        As `delta_rule`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, beta is negative, or chunk_tokens is below 1.

    Source: FedNL (arXiv 2605.16350) figure 6, "w/o delta"; linear attention (arXiv 2006.16236).
    """
    if _by_token(k, chunk_tokens):
        return hebbian_reference(q, k, v, beta, state=state)
    out, memory = _by_chunk(checked(q, k, v, beta, state=state), chunk_tokens, residual=False)
    return out, memory.state


def decay_separate_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor,
    state: Tensor | None = None,
    chunk_tokens: int = 32,
) -> tuple[Tensor, Tensor]:
    """Writes and reads a memory that decays, and whose residual is taken of the state before its decay.

    `delta_rule` with a decay takes the residual after it; the two differ wherever the factor is not 1. No write
    amplifies the state while beta * |k|^2 is at most 1 plus the decay's factor, as it is with beta in [0, 1].

    Args:
        q, k, v, state, chunk_tokens: as in `delta_rule`.
        beta: Write strength, [batch, tokens, kv_heads], at least 0. A pad has beta 0 and log_decay 0.
        log_decay: Natural logarithm of the factor on the state, [batch, tokens, kv_heads], at most 0; minus infinity
            keeps nothing but what the token itself writes.

    Returns:
        As `delta_rule`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, beta is negative, log_decay is positive, or
            chunk_tokens is below 1.

    Source: Titans (arXiv 2501.00663) equation 13 without momentum; Nested Learning (arXiv 2512.24695) equation 88;
    the chunked form is ours.
    """
    if _by_token(k, chunk_tokens):
        return decay_separate_reference(q, k, v, beta, log_decay=log_decay, state=state)
    out, memory = _by_chunk(checked(q, k, v, beta, log_decay=log_decay, state=state), chunk_tokens)
    return out, memory.state


def titans_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor,
    log_momentum: Tensor,
    keep: Tensor | None = None,
    state: Tensor | None = None,
    momentum: Tensor | None = None,
    chunk_tokens: int = 32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes and reads a memory that descends with momentum and a forget gate: Titans' memory, linear, exact.

    A token takes the gradient at the state just before it; nothing is taken at a chunk's start instead. Keys that
    change can set the momentum swinging: with eta 0.7 and beta 1 on random unit keys the state grows without bound.
    With one eta for all tokens and no decay it stays bounded, whatever the keys, while
    beta * |k|^2 <= 2 (1 - eta)^2 / (1 + eta): then |S + c P|^2 + c |P|^2 / (1 - eta) never grows without values, where
    c = eta / (1 - eta).

    Args:
        q, k, v, state, chunk_tokens: as in `delta_rule`.
        beta: Write strength, [batch, tokens, kv_heads], at least 0: twice Titans' theta, whose loss has no 1/2.
        log_decay: Natural logarithm of the factor a on the state, Titans' 1 - alpha, [batch, tokens, kv_heads], at
            most 0.
        log_momentum: Natural logarithm of the factor eta on the momentum, as `log_decay`.
        keep: [batch, tokens] bool, False for a pad, which leaves state and momentum as they are whatever its other
            numbers; None if all is real. (Without it a pad would still move the state by its momentum.)
        momentum: The momentum to start from, as `state`. None means zeros.

    Returns:
        The answers and the state, as `delta_rule`, and the momentum after the last token, as the state.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, beta is negative, a logarithm is positive, or
            chunk_tokens is below 1.

    Source: Titans (arXiv 2501.00663) equations 9, 10, 13 and 14; the chunked form and the bound are ours.
    """
    if _by_token(k, chunk_tokens):
        return titans_reference(
            q, k, v, beta, log_decay=log_decay, log_momentum=log_momentum, keep=keep, state=state, momentum=momentum
        )
    given = checked(
        q, k, v, beta, log_decay=log_decay, log_momentum=log_momentum, keep=keep, state=state, momentum=momentum
    )
    out, memory = _by_chunk(given, chunk_tokens)
    assert memory.momentum is not None
    return out, memory.state, memory.momentum


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


def _by_token(k: Tensor, chunk_tokens: int) -> bool:
    """Whether the sequence is so short that the recurrence is faster."""
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    return k.ndim == 4 and k.shape[1] <= RECURRENCE_TOKENS


def _by_chunk(given: Given, chunk: int, residual: bool = True) -> tuple[Tensor, Memory]:
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
