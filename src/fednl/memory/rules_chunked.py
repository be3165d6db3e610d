"""The update rules beside the delta rule, chunk by chunk: the same results as their references, faster.

The implicit delta rule and DeltaProduct are the delta rule on other numbers and use its chunked form. The others have
one of their own, `fednl.memory.chunks`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fednl.memory.arguments import autocast_off
from fednl.memory.chunks import by_chunk
from fednl.memory.kernels import delta_rule
from fednl.memory.operator import RECURRENCE_TOKENS
from fednl.memory.rules_reference import (
    by_write,
    check_writes,
    checked,
    checked_separate,
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
        beta: Write strengths, [batch, tokens, writes, kv_heads], from 0 to 2 for unit keys, as in `delta_rule`; the
            decay counts for a token's first write. A pad has 0.
        log_decay: as in `delta_rule`, once per token.
        chunk_tokens: Writes solved at once, at least 1. Changes the speed, not the result.

    Returns:
        As `delta_rule`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, beta is negative or lets the state grow without
            bound, log_decay is positive, or chunk_tokens is below 1.

    Source: DeltaProduct (arXiv 2502.10297).
    """
    check_writes(k, v, beta)
    checked(q, k[:, :, 0], v[:, :, 0], beta[:, :, 0], log_decay=log_decay, state=state)
    writes = k.shape[2]
    decays = by_write(log_decay, writes)
    decays = None if decays is None else decays.flatten(1, 2)
    asked = F.pad(q.unsqueeze(2), (0, 0, 0, 0, writes - 1, 0)).flatten(1, 2)
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
        beta: Write strength, [batch, tokens, kv_heads], at least 0 and without upper bound: the state grows with the
            number of writes, never faster. A pad has 0.

    Returns:
        As `delta_rule`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, beta is negative, or chunk_tokens is below 1.

    Source: FedNL (arXiv 2605.16350) figure 6, "w/o delta"; linear attention (arXiv 2006.16236).
    """
    if _by_token(k, chunk_tokens):
        return hebbian_reference(q, k, v, beta, state=state)
    out, memory = by_chunk(checked(q, k, v, beta, state=state), chunk_tokens, residual=False)
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
        beta: Write strength, [batch, tokens, kv_heads], from 0 to 1 plus the decay's factor for unit keys; above 1 it
            is refused where beta * |k|^2 is more. A pad has beta 0 and log_decay 0.
        log_decay: Natural logarithm of the factor on the state, [batch, tokens, kv_heads], at most 0; minus infinity
            keeps nothing but what the token itself writes.

    Returns:
        As `delta_rule`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, beta is negative or lets the state grow without
            bound, log_decay is positive, or chunk_tokens is below 1.

    Source: Titans (arXiv 2501.00663) equation 13 without momentum; Nested Learning (arXiv 2512.24695) equation 88;
    the chunked form is ours.
    """
    if _by_token(k, chunk_tokens):
        return decay_separate_reference(q, k, v, beta, log_decay=log_decay, state=state)
    out, memory = by_chunk(checked_separate(q, k, v, beta, log_decay=log_decay, state=state), chunk_tokens)
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
        beta: Write strength, [batch, tokens, kv_heads], at least 0: twice Titans' theta, whose loss has no 1/2. Above
            1 it is refused where beta * |k|^2 is more than (1 + a) (1 + eta): there the state grows without bound even
            under one key. Below, keys that change can still do it, up to the bound above.
        log_decay: Natural logarithm of the factor a on the state, Titans' 1 - alpha, [batch, tokens, kv_heads], at
            most 0.
        log_momentum: Natural logarithm of the factor eta on the momentum, as `log_decay`.
        keep: [batch, tokens] bool, False for a pad, which leaves state and momentum as they are whatever its other
            numbers; None if all is real. (Without it a pad would still move the state by its momentum.)
        momentum: The momentum to start from, as `state`. None means zeros.

    Returns:
        The answers and the state, as `delta_rule`, and the momentum after the last token, as the state.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, beta is negative or lets the state grow without
            bound, a logarithm is positive, or chunk_tokens is below 1.

    Source: Titans (arXiv 2501.00663) equations 9, 10, 13 and 14; the chunked form and the bound are ours.
    """
    if _by_token(k, chunk_tokens):
        return titans_reference(
            q, k, v, beta, log_decay=log_decay, log_momentum=log_momentum, keep=keep, state=state, momentum=momentum
        )
    given = checked_separate(
        q, k, v, beta, log_decay=log_decay, log_momentum=log_momentum, keep=keep, state=state, momentum=momentum
    )
    out, memory = by_chunk(given, chunk_tokens)
    assert memory.momentum is not None
    return out, memory.state, memory.momentum


def _by_token(k: Tensor, chunk_tokens: int) -> bool:
    """Whether the sequence is so short that the recurrence is faster."""
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    return k.ndim == 4 and k.shape[1] <= RECURRENCE_TOKENS
