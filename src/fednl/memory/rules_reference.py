"""The update rules beside the delta rule, one token at a time: what each of them means.

Per sequence and key/value head, a state S of shape [key_dim, value_dim] maps keys to values. A rule says what token t
does to it; then every query head of the group reads `S^T q_t`. With a_t = exp(log_decay_t) and S, S' before and after:

    implicit delta   S' = S + r k (v - S^T k)^T,  r = beta / (1 + beta |k|^2)
    decay-separate   S' = a S + beta k (v - S^T k)^T          the residual is of the state before its decay
    Hebbian          S' = S + beta k v^T
    DeltaProduct     S <- a S once, then S <- S + beta_j k_j (v_j - S^T k_j)^T for each write j of the token
    Titans           P' = eta P + beta k (v - S^T k)^T,  S' = a S + P',  eta = exp(log_momentum)

The gated delta rule, whose residual is of the state after its decay, is `delta_rule` with a `log_decay`.
These loops are the specification; `fednl.memory.rules_chunked` computes the same faster. They are slow, plain, and
differentiable to any order. No argument is modified. All compute in float32, or in float64 if any floating-point
argument is float64, also under autocast; nothing is scaled or normalised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fednl.memory.arguments import (
    DELTA_MOST,
    SEPARATE_MOST,
    autocast_off,
    check_argument,
    check_arguments,
    check_ranges,
    check_strengths,
    compute_dtype,
    delta_bound,
    separate_bound,
    start_state,
    unflatten,
)


def implicit_delta_reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Moves the state to the exact minimum of the proximal objective: the specification of `implicit_delta_rule`.

    Arguments, results and errors are those of `implicit_delta_rule`.

    Source: FedNL (arXiv 2605.16350) equation 2; Nested Learning (arXiv 2512.24695) equations 56 and 57.
    """

    def step(now: Memory, token: Token) -> Memory:
        rate = token.beta / (1 + token.beta * token.key.square().sum(-1, keepdim=True))
        return Memory(now.state + token.key.mT * (rate * _residual(now.state, token)), None)

    return _plain(_recur(step, checked(q, k, v, beta, state=state)))


def decay_separate_reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, log_decay: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Decays the state, and writes the residual of the undecayed one: the specification of `decay_separate_rule`.

    Arguments, results and errors are those of `decay_separate_rule`.

    Source: Titans (arXiv 2501.00663) equation 13 without momentum; Nested Learning (arXiv 2512.24695) equation 88.
    """

    def step(now: Memory, token: Token) -> Memory:
        written = token.key.mT * (token.beta * _residual(now.state, token))
        return Memory(token.decay * now.state + written, None)

    return _plain(_recur(step, checked_separate(q, k, v, beta, log_decay=log_decay, state=state)))


def hebbian_reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Adds every value under its key and takes nothing away: the specification of `hebbian_rule`.

    Arguments, results and errors are those of `hebbian_rule`.

    Source: FedNL (arXiv 2605.16350) figure 6, "w/o delta"; linear attention (arXiv 2006.16236).
    """

    def step(now: Memory, token: Token) -> Memory:
        return Memory(now.state + token.key.mT * (token.beta * token.value), None)

    return _plain(_recur(step, checked(q, k, v, beta, state=state)))


def delta_product_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decays once a token, then makes several delta writes, then reads: the specification of `delta_product_rule`.

    Arguments, results and errors are those of `delta_product_rule`.

    Source: DeltaProduct (arXiv 2502.10297).
    """
    check_writes(k, v, beta)
    given = checked(q, k[:, :, 0], v[:, :, 0], beta[:, :, 0], log_decay=log_decay, state=state, more=(k, v, beta))
    check_strengths(k, beta, DELTA_MOST, lambda: delta_bound(by_write(log_decay, k.shape[2])))
    given = given._replace(k=k.to(given.dtype), v=v.to(given.dtype), beta=beta.to(given.dtype))

    def step(now: Memory, token: Token) -> Memory:
        state = token.decay * now.state
        for key, value, strength in zip(*(x.unbind(1) for x in token[:3]), strict=True):
            state = state + key.mT * (strength * (value - key @ state))
        return Memory(state, None)

    return _plain(_recur(step, given))


def titans_reference(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Descends with momentum and a forget gate: the specification of `titans_rule`.

    Arguments, results and errors are those of `titans_rule`.

    Source: Titans (arXiv 2501.00663) equations 9, 10, 13 and 14, linear memory, beta = 2 theta.
    """

    def step(now: Memory, token: Token) -> Memory:
        assert now.momentum is not None
        written = token.key.mT * (token.beta * _residual(now.state, token))
        momentum = token.momentum * now.momentum + written
        state = token.decay * now.state + momentum
        return Memory(torch.where(token.keep, state, now.state), torch.where(token.keep, momentum, now.momentum))

    given = checked_separate(
        q, k, v, beta, log_decay=log_decay, log_momentum=log_momentum, keep=keep, state=state, momentum=momentum
    )
    out, memory = _recur(step, given)
    assert memory.momentum is not None
    return out, memory.state, memory.momentum


class Memory(NamedTuple):
    """What a rule carries from token to token, each `[batch, kv_heads, key_dim, value_dim]`; `momentum` or `None`."""

    state: Tensor
    momentum: Tensor | None


class Token(NamedTuple):
    """One token; with several writes a token, the first three have a dimension for them after `batch`."""

    key: Tensor
    """`[batch, kv_heads, 1, key_dim]`"""
    value: Tensor
    """`[batch, kv_heads, 1, value_dim]`"""
    beta: Tensor
    """`[batch, kv_heads, 1, 1]`, as are the next two"""
    decay: Tensor
    momentum: Tensor
    keep: Tensor
    """`[batch, 1, 1, 1]` bool"""


class Given(NamedTuple):
    """Checked arguments in the dtype computed in, `q` but for its dtype as it was given."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    log_momentum: Tensor | None
    keep: Tensor | None
    state: Tensor
    momentum: Tensor | None
    dtype: torch.dtype


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    log_momentum: Tensor | None = None,
    keep: Tensor | None = None,
    state: Tensor | None = None,
    momentum: Tensor | None = None,
    more: tuple[Tensor, ...] = (),
) -> Given:
    """Checks a rule's arguments and brings them to one dtype; `more` has a say in which.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, a strength is negative or a logarithm positive.
    """
    check_arguments(q, k, v, beta, log_decay, state, None)
    check_argument("log_momentum", log_momentum, tuple(beta.shape), k, v)
    check_argument("keep", keep, tuple(k.shape[:2]), k, v, "bool")
    check_argument("momentum", momentum, (k.shape[0], *k.shape[2:], v.shape[3]), k, v)
    if log_momentum is not None:
        check_ranges(beta, log_momentum, "log_momentum")
    dtype = compute_dtype(q, k, v, beta, log_decay, log_momentum, state, momentum, *more)
    with autocast_off(k.device):
        decay, push = (None if x is None else x.to(dtype) for x in (log_decay, log_momentum))
        second = None if log_momentum is None else start_state(k, v, momentum, dtype)
        start = start_state(k, v, state, dtype)
        return Given(q, k.to(dtype), v.to(dtype), beta.to(dtype), decay, push, keep, start, second, dtype)


def checked_separate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor,
    log_momentum: Tensor | None = None,
    keep: Tensor | None = None,
    state: Tensor | None = None,
    momentum: Tensor | None = None,
) -> Given:
    """`checked`, for a rule whose residual is of the state before its decay.

    Raises:
        ValueError: as there, or a write would make the state grow without bound.
    """
    given = checked(
        q, k, v, beta, log_decay=log_decay, log_momentum=log_momentum, keep=keep, state=state, momentum=momentum
    )

    strengths = beta if keep is None else beta.masked_fill(~keep.unsqueeze(-1), 0)
    check_strengths(k, strengths, SEPARATE_MOST, lambda: separate_bound(log_decay, log_momentum))
    return given


def by_write(log_decay: Tensor | None, writes: int) -> Tensor | None:
    """A token's log decay for the first of its writes, 0 for the others: `[batch, tokens, writes, kv_heads]`."""
    return None if log_decay is None else F.pad(log_decay.unsqueeze(2), (0, 0, 0, writes - 1))


def check_writes(k: Tensor, v: Tensor, beta: Tensor) -> None:
    """Raises `ValueError` unless the arguments hold the same number of writes, at least one, for every token."""
    for name, tensor in (("k", k), ("v", v)):
        if tensor.ndim != 5 or tensor.shape[2] == 0:
            raise ValueError(f"{name} must be [batch, tokens, writes, heads, dim], not {tuple(tensor.shape)}")
    for name, shape in (("v", v.shape[:4]), ("beta", beta.shape)):
        if shape != k.shape[:4]:
            raise ValueError(f"{name} is {tuple(shape)} up to its heads, but k is {tuple(k.shape[:4])}")
    for name, tensor in (("v", v), ("beta", beta)):
        if tensor.device != k.device:
            raise ValueError(f"{name} is on device {tensor.device}, but k is on {k.device}")
    check_ranges(beta, None)


def _recur(step: Callable[[Memory, Token], Memory], given: Given) -> tuple[Tensor, Memory]:
    """Runs a rule over all tokens: the answers in q's dtype, and what the rule carries after the last."""
    q, memory = given.q, Memory(given.state, given.momentum)
    heads = given.state.shape[1]
    with autocast_off(q.device):
        ones = torch.ones(*q.shape[:2], heads, dtype=given.dtype, device=q.device)
        decay, momentum = (ones if x is None else x.exp() for x in (given.log_decay, given.log_momentum))
        keep = ones[:, :, :1].bool() if given.keep is None else given.keep[:, :, None]
        rows = [x.unsqueeze(-2) for x in (given.k, given.v)]
        factors = [x[..., None, None] for x in (given.beta, decay, momentum, keep)]
        outs = []
        for query, *token in zip(*(x.unbind(1) for x in (q.to(given.dtype), *rows, *factors)), strict=True):
            memory = step(memory, Token(*token))
            outs.append((unflatten(query, 1, heads) @ memory.state).flatten(1, 2))
        if not outs:
            kept = None if memory.momentum is None else memory.momentum.clone()
            return q.new_empty(*q.shape[:3], given.v.shape[-1]), Memory(memory.state.clone(), kept)
        return torch.stack(outs, 1).to(q.dtype), memory


def _residual(state: Tensor, token: Token) -> Tensor:
    """What the state recalls wrongly under the token's key, `[batch, kv_heads, 1, value_dim]`."""
    return token.value - token.key @ state


def _plain(result: tuple[Tensor, Memory]) -> tuple[Tensor, Tensor]:
    return result[0], result[1].state
