"""The delta-rule memory: the token-by-token recurrence, and `delta_rule`, which computes the same faster.

Per sequence and key/value head, a state S of shape [key_dim, value_dim] maps keys to values. Token t does

    S <- exp(log_decay_t) S               decay (the gated delta rule; absent by default)
    S <- S + beta_t k_t (v_t - S^T k_t)^T write
    o_t = S^T q_t                         read, after the write, by every query head of the group

`delta_rule_reference` does exactly this and is the specification. `delta_rule` does it in few products for a few
tokens, and chunk by chunk for more (`fednl.memory.delta_chunks`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fednl.memory.arguments import (
    FORGET,
    ROUNDING,
    autocast_off,
    check_arguments,
    compute_dtype,
    start_state,
    unflatten,
)
from fednl.memory.delta_chunks import delta_by_chunk

RECURRENCE_TOKENS = 8  # up to here the recurrence is faster than one padded chunk


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    doc_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes and reads the delta-rule memory one token at a time: the specification of `delta_rule`.

    Arguments, results and errors are those of `delta_rule`. Slow, plain, and differentiable to any order.

    Source: FedNL (arXiv 2605.16350) equations 3 and 9; with a decay, Gated DeltaNet (arXiv 2412.06464).
    """
    check_arguments(q, k, v, beta, log_decay, state, doc_ids, delta=True)
    dtype = compute_dtype(q, k, v, beta, log_decay, state)
    with autocast_off(q.device):
        memory = start_state(k, v, state, dtype)
        queries, keys, values, strengths = (x.to(dtype).unbind(1) for x in (q, k, v, beta))
        factors = None if log_decay is None else log_decay.to(dtype).exp().unbind(1)
        outs = []
        for t in range(k.shape[1]):
            if doc_ids is not None and t > 0:
                same = doc_ids[:, t] == doc_ids[:, t - 1]
                memory = torch.where(same[:, None, None, None], memory, torch.zeros_like(memory))
            if factors is not None:
                memory = memory * factors[t][..., None, None]
            key = keys[t].unsqueeze(-2)
            residual = values[t].unsqueeze(-2) - key @ memory
            memory = memory + key.mT * (strengths[t][..., None, None] * residual)
            outs.append((unflatten(queries[t], 1, k.shape[2]) @ memory).flatten(1, 2))
        if not outs:
            return q.new_empty(*q.shape[:3], v.shape[3]), memory.clone()
        return torch.stack(outs, 1).to(q.dtype), memory


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    doc_ids: Tensor | None = None,
    chunk_tokens: int = 32,
) -> tuple[Tensor, Tensor]:
    """Writes a sequence into the delta-rule memory and reads every token's answer from it.

    Query head h reads the state of KV head h // (query_heads / kv_heads). Nothing is scaled or normalised:
    the caller does that. No write amplifies the state while beta * |k|^2 is in [0, 2], as it is with unit
    keys and beta in [0, 1]; that keys are not longer than 1 is the caller's to see to. NaN comes out as NaN,
    never as a number. No argument is modified. Computes in float32, or in float64 if any floating-point
    argument is float64, also under autocast. Where beta * |k|^2 exceeds 1 anywhere, chunks are solved in
    float64 inside, at about twice the cost, so that they are as exact as below it.

    Args:
        q: Queries, [batch, tokens, query_heads, key_dim].
        k: Keys, [batch, tokens, kv_heads, key_dim]; kv_heads divides query_heads.
        v: Values, [batch, tokens, kv_heads, value_dim].
        beta: Write strength, [batch, tokens, kv_heads], from 0 to 2 for unit keys. 0 writes nothing; 1 with a unit key
            replaces what the key recalled. Above 2 it is refused unless beta * |k|^2 is at most 2, or with a decay of
            factor a at most 1 + 1 / a: beyond it the same write again and again makes the state grow without bound. A
            pad is beta 0 and log_decay 0: it leaves the state as it is.
        log_decay: Natural logarithm of the factor on the state, applied before the token's residual is taken,
            [batch, tokens, kv_heads], at most 0; minus infinity forgets all. None means no decay.
        state: The state to start from, [batch, kv_heads, key_dim, value_dim]. None means zeros.
        doc_ids: The document of each token, int64 [batch, tokens]. Where the id differs from the previous
            token's, the state restarts from zeros: `state` enters only the first document, and the returned
            one is the last's. A pad therefore carries the id of its neighbour. None means one document.
        chunk_tokens: Tokens solved at once, at least 1. Changes the speed, not the result.

    Returns:
        The answers, [batch, tokens, query_heads, value_dim] in q's dtype, and the state after the last token,
        [batch, kv_heads, key_dim, value_dim] in the dtype computed in. Both carry gradients to every
        floating-point argument (of first order).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, beta is negative or lets the state grow without
            bound, log_decay is positive, or chunk_tokens is below 1.

    Source: FedNL (arXiv 2605.16350) equations 3, 9 and 14; chunked form: DeltaNet (arXiv 2406.06484) and
    Gated DeltaNet (arXiv 2412.06464); one state per KV head and the backward pass: ours.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    if k.ndim == 4 and (k.shape[1] == 0 or (doc_ids is not None and k.shape[1] <= RECURRENCE_TOKENS)):
        return delta_rule_reference(q, k, v, beta, log_decay=log_decay, state=state, doc_ids=doc_ids)
    check_arguments(q, k, v, beta, log_decay, state, doc_ids, delta=True)
    dtype = compute_dtype(q, k, v, beta, log_decay, state)
    with autocast_off(q.device):
        if k.shape[1] <= RECURRENCE_TOKENS:
            return _recurrence(q, k, v, beta, log_decay, start_state(k, v, state, dtype))
        inside = torch.float64 if _overshoots(k, beta) else dtype
        log = _log_factors(beta, log_decay, doc_ids, inside)
        out, after = delta_by_chunk(q, k, v, beta.to(inside), log, start_state(k, v, state, inside), chunk_tokens)
        return out, after.to(dtype)


def _overshoots(k: Tensor, beta: Tensor) -> bool:
    """Whether a write takes what its key recalls beyond the new value, to the other side.

    Then writes along one key undo each other in turn. The recurrence damps each one's rounding error with the next
    write; a chunk adds the writes up, and in float32 loses a digit to their cancelling.
    """
    return bool((beta.detach() * k.detach().square().sum(-1, dtype=torch.float32) > 1 + ROUNDING).any())


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence in three products a token; `state` is in the dtype computed in."""
    batch, _, heads = k.shape[:3]

    def rows(x: Tensor) -> Sequence[Tensor]:
        """[batch, tokens, heads * G, ...] as [batch * heads, G, ...], one of each token."""
        return unflatten(x.to(state.dtype), 2, heads).transpose(0, 1).flatten(1, 2).unbind(0)

    memory, outs = state.flatten(0, 1), []
    factors = None if log_decay is None else rows(log_decay.to(state.dtype).exp().unsqueeze(-1))
    strengths = rows(beta.unsqueeze(-1))
    for t, (queries, key, value) in enumerate(zip(rows(q), rows(k), rows(v), strict=True)):
        if factors is not None:
            memory = memory * factors[t]
        write = strengths[t] * torch.baddbmm(value, key, memory, alpha=-1)
        memory = torch.baddbmm(memory, key.mT, write)
        outs.append(torch.bmm(queries, memory))
    answers = unflatten(torch.stack(outs, 1), 0, batch).transpose(1, 2).flatten(2, 3)
    return answers.to(q.dtype), memory.view(state.shape)


def _log_factors(beta: Tensor, log_decay: Tensor | None, doc_ids: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The log decay with a full reset at each document's first token; None if nothing scales the state."""
    log = None if log_decay is None else log_decay.to(dtype).clamp(min=FORGET)
    if doc_ids is None:
        return log
    log = torch.zeros_like(beta, dtype=dtype) if log is None else log
    first = torch.zeros_like(doc_ids[:, :1], dtype=torch.bool)
    starts = torch.cat([first, doc_ids[:, 1:] != doc_ids[:, :-1]], 1)
    return log.masked_fill(starts.unsqueeze(-1), FORGET)
