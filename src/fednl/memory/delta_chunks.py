"""The delta rule chunk by chunk, with its backward pass: the twin of the recurrence in `fednl.memory.operator`.

A sequence is cut into chunks of C tokens, each solved at once. Rows of K, V and Q are tokens, b is beta, c the log
decay summed from the chunk's start, L_ij = exp(c_i - c_j) for j <= i and else 0:

    T  = (I + strictly_lower(diag(b) (K K^T * L)))^-1
    U  = T diag(b) V - W S,   W = T diag(b exp(c)) K
    O  = diag(exp(c)) Q S + (Q K^T * L) U
    S' = exp(c_C) S + (diag(exp(c_C - c)) K)^T U

All is batched over M = chunks * batch * kv_heads, except the updates of U and S, which run in order; the
backward pass is the mirrored loop. Both take time linear in the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fednl.memory.arguments import autocast_off, unflatten

_SEGMENT_TOKENS = 256  # chunks are worked on in segments of this size, which fit the processor's cache
_RECOMPUTE_TOKENS = 2048  # longer sequences keep only each segment's first state for the backward pass


def delta_by_chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_factors: Tensor | None, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """The delta rule on checked arguments: shapes and results as in `fednl.memory.operator.delta_rule`.

    Args:
        q, k, v: of any floating-point dtype.
        beta, log_factors, state: in the dtype computed in; log factors at least `FORGET`, `None` where nothing decays.
        chunk: tokens solved at once, at least 1.
    """
    inputs = (q, k, v, beta, log_factors, state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    out, memory = _ChunkedDeltaRule.apply(*inputs, chunk, keep)  # type: ignore[no-untyped-call]
    return out, memory


def token_rows(x: Tensor, heads: int, chunk: int) -> Tensor:
    """[batch, tokens, heads * G, dim] as [chunks, batch, heads, G, C, dim], zeros after the last token."""
    if pad := -x.shape[1] % chunk:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad))
    return unflatten(unflatten(x, 2, heads), 1, x.shape[1] // chunk).permute(1, 0, 3, 4, 2, 5)


def _stack(rows: Tensor, dtype: torch.dtype, above: Tensor | None = None) -> Tensor:
    """[chunks, batch, heads, G, C, dim] as [M, (1 + G) * C, dim], the first C rows being `above` or unset."""
    chunks, batch, heads, group, chunk, dim = rows.shape
    out = torch.empty(chunks, batch, heads, 1 + group, chunk, dim, dtype=dtype, device=rows.device)
    out[:, :, :, 1:] = rows
    if above is not None:
        out[:, :, :, :1] = above
    return out.view(chunks * batch * heads, (1 + group) * chunk, dim)


def _write_rows(rows: Tensor, target: Tensor, heads: int, chunk: int) -> None:
    """Copies rows back into `target` [batch, tokens, heads * G, dim], dropping those beyond its tokens."""
    batch, tokens, *rest = target.shape
    full = target if tokens % chunk == 0 else target.new_empty(batch, tokens + -tokens % chunk, *rest)
    view = token_rows(full, heads, chunk)
    view.copy_(rows.reshape(view.shape))
    if full is not target:
        target.copy_(full[:, :tokens])


def intervals(chunk: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """0/1 matrices [C, C * C] and [C, C] that sum log decays over tokens (j, i] and [0, i].

    Summing each interval, instead of subtracting cumulative sums, cancels no digits: a strong decay or a
    document's start does not blur the weak decays after it.
    """
    token = torch.arange(chunk, device=like.device)
    until = token[:, None] <= token
    between = until[:, :, None] & (token[:, None, None] > token)
    return between.flatten(1).to(like.dtype), until.to(like.dtype)


class _Segment(NamedTuple):
    """What the backward pass needs of one segment; G = query heads per KV head."""

    kq: Tensor  # [M, (1 + G) * C, key_dim]: the keys, then the queries of each head of the group
    v: Tensor  # [M, C, value_dim]
    beta: Tensor  # [M, C, 1]
    gram: Tensor  # [M, (1 + G) * C, C]: K K^T * L, then Q K^T * L
    inverse: Tensor  # [M, C, C]: T
    w: Tensor  # [M, C, key_dim]: W
    u: Tensor  # [M, C, value_dim]: U
    states: Tensor  # [chunks + 1, batch * kv_heads, key_dim, value_dim]
    pair: Tensor | None  # [M, C, C]: L; this and the next two are None if nothing scales the state
    read: Tensor | None  # [M, C, 1]: exp(c)
    carry: Tensor | None  # [M, C, 1]: exp(c_C - c)


def _solve(start: Tensor, chunk: int, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log: Tensor | None) -> _Segment:
    """Everything of a segment but its answers; `start` is [batch * kv_heads, key_dim, value_dim]."""
    heads = k.shape[2]
    kq = _stack(token_rows(q, heads, chunk), start.dtype, token_rows(k, heads, chunk))
    total, k_rows = kq.shape[0], kq[:, :chunk]
    chunks = -(-k.shape[1] // chunk)
    v_rows = token_rows(v, heads, chunk).to(start.dtype).reshape(total, chunk, v.shape[3])
    strength = token_rows(beta.unsqueeze(-1), heads, chunk).reshape(total, chunk, 1)
    pair = read = carry = None
    if log is not None:
        between, until = intervals(chunk, log)
        logs = token_rows(log.unsqueeze(-1), heads, chunk).reshape(total, chunk)
        pair = unflatten((logs @ between).exp_(), 1, chunk).tril_()
        read, carry = (logs @ until).exp_().unsqueeze(-1), pair[:, -1].unsqueeze(-1)

    gram = _mask_(torch.bmm(kq, k_rows.mT), pair)
    identity = torch.eye(chunk, dtype=gram.dtype, device=gram.device).expand(total, chunk, chunk)
    # Reads only what is strictly below the diagonal. The Neumann series loses every digit when keys repeat.
    inverse = torch.linalg.solve_triangular(gram[:, :chunk] * strength, identity, upper=False, unitriangular=True)
    scaled = inverse * strength.mT
    u = torch.bmm(scaled, v_rows)
    w = torch.bmm(scaled if read is None else scaled * read.mT, k_rows)
    states = _run(u, w, k_rows if carry is None else k_rows * carry, read, start, chunks)
    return _Segment(kq, v_rows, strength, gram, inverse, w, u, states, pair, read, carry)


def _run(u: Tensor, w: Tensor, carried: Tensor, read: Tensor | None, start: Tensor, chunks: int) -> Tensor:
    """Turns `u` = T diag(b) V into U in place, chunk after chunk, and returns every state."""
    states = start.new_empty(chunks + 1, *start.shape)
    states[0] = start
    steps = states.unbind(0)  # taken apart once: every index costs as much as a small product
    parts = [unflatten(x, 0, chunks).unbind(0) for x in (u, w, carried.mT)]
    factors = None if read is None else unflatten(read[:, -1:], 0, chunks).unbind(0)
    for n, (u_n, w_n, k_n) in enumerate(zip(*parts, strict=True)):
        torch.baddbmm(u_n, w_n, steps[n], alpha=-1, out=u_n)
        decayed = steps[n] if factors is None else steps[n] * factors[n]
        torch.baddbmm(decayed, k_n, u_n, out=steps[n + 1])
    return states


def _mask_(rows: Tensor, pair: Tensor | None) -> Tensor:
    """Multiplies each [C, C] block of `rows` by L, in place."""
    blocks = unflatten(rows, 1, rows.shape[1] // rows.shape[2])
    if pair is None:
        blocks.tril_()
    else:
        blocks.mul_(pair.unsqueeze(1))
    return rows


def _by_token(rows: Tensor, factor: Tensor) -> Tensor:
    """`rows` [M, n * C, dim] times a factor per token [M, C, 1]."""
    return (unflatten(rows, 1, rows.shape[1] // factor.shape[1]) * factor.unsqueeze(1)).flatten(1, 2)


def _answers(seg: _Segment, chunk: int) -> Tensor:
    """O of a segment, [M, G * C, value_dim]."""
    out = torch.bmm(seg.kq[:, chunk:], seg.states[:-1].flatten(0, 1))
    if seg.read is not None:
        out = _by_token(out, seg.read)
    return torch.baddbmm(out, seg.gram[:, chunk:], seg.u, out=out)


def _run_back(seg: _Segment, d_out: Tensor, d_last: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Gradients of U and of every state, from the last chunk to the first."""
    chunks = seg.states.shape[0] - 1
    d_u = torch.bmm(seg.gram[:, chunk:].mT, d_out)
    d_states = torch.empty_like(seg.states)
    d_states[-1] = d_last
    d_read = d_out if seg.read is None else _by_token(d_out, seg.read)
    torch.bmm(seg.kq[:, chunk:].mT, d_read, out=d_states[:-1].flatten(0, 1))
    carried = seg.kq[:, :chunk] if seg.carry is None else seg.kq[:, :chunk] * seg.carry
    steps = d_states.unbind(0)
    parts = [unflatten(x, 0, chunks).unbind(0) for x in (d_u, seg.w.mT, carried)]
    factors = None if seg.read is None else unflatten(seg.read[:, -1:], 0, chunks).unbind(0)
    for n, (u_n, w_n, k_n) in reversed(list(enumerate(zip(*parts, strict=True)))):
        after = steps[n + 1]
        torch.baddbmm(u_n, k_n, after, out=u_n)
        steps[n].add_(after if factors is None else after * factors[n])
        torch.baddbmm(steps[n], w_n, u_n, alpha=-1, out=steps[n])
    return d_u, d_states


def _gradients(
    seg: _Segment, stacked: Tensor, d_last: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of q, k, v, beta, the log factors (as rows) and the state a segment started from.

    `stacked` holds the gradient of the answers below C unset rows, which are written.
    With R = T^T dU, the gradient of b (V - exp(c) K S), the matrix under the inverse gets -R U^T and
    b exp(c) K gets -R S^T, so neither W nor its gradient is needed here.
    """
    k_rows = seg.kq[:, :chunk]
    d_u, d_states = _run_back(seg, stacked[:, chunk:], d_last, chunk)
    before, after = seg.states[:-1].flatten(0, 1), d_states[1:].flatten(0, 1)
    d_rhs = torch.bmm(seg.inverse.mT, d_u)
    torch.neg(d_rhs, out=stacked[:, :chunk])
    d_gram = torch.bmm(stacked, seg.u.mT)
    d_kq = torch.bmm(stacked, before.mT)
    if seg.read is not None:
        d_kq = _by_token(d_kq, seg.read)
    d_gram[:, :chunk].tril_(-1)
    d_beta = (d_gram[:, :chunk] * seg.gram[:, :chunk]).sum(-1) + (d_kq[:, :chunk] * k_rows).sum(-1)
    d_beta += (d_rhs * seg.v).sum(-1)
    d_gram[:, :chunk].mul_(seg.beta)
    d_kq[:, :chunk].mul_(seg.beta)
    d_carried = torch.bmm(seg.u, after.mT)
    d_log = None
    if seg.read is not None and seg.carry is not None:
        d_carried.mul_(seg.carry)
        kept = seg.read[:, -1, 0] * (before * after).sum((-2, -1))
        d_log = _log_gradient(d_gram * seg.gram, d_kq * seg.kq, d_carried * k_rows, kept)
    _mask_(d_gram, seg.pair)
    torch.baddbmm(d_kq, d_gram, k_rows, out=d_kq)
    d_k = torch.baddbmm(d_carried, d_gram.mT, seg.kq, out=d_carried).add_(d_kq[:, :chunk])
    return d_kq[:, chunk:], d_k, d_rhs.mul_(seg.beta), d_beta, d_log, d_states[0]


def _log_gradient(pairs: Tensor, reads: Tensor, carries: Tensor, kept: Tensor) -> Tensor:
    """Gradient of the log factors, [M, C], from each factor exp(x) times its gradient, which is that of x."""
    chunk = pairs.shape[2]
    d_pair = unflatten(pairs, 1, pairs.shape[1] // chunk).sum(1)
    d_pair[:, -1] += carries.sum(-1)
    d_read = unflatten(reads.sum(-1), 1, reads.shape[1] // chunk).sum(1)
    d_read[:, -1] += kept
    between, until = intervals(chunk, pairs)
    return torch.addmm(d_read @ until.mT, d_pair.flatten(1), between.mT)


def _spans(tokens: int, chunk: int) -> list[slice]:
    """The segments' token ranges: whole chunks, about _SEGMENT_TOKENS each."""
    size = max(1, _SEGMENT_TOKENS // chunk) * chunk
    return [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)]


class _ChunkedDeltaRule(torch.autograd.Function):
    """The chunked form on [batch, tokens, heads, dim] tensors, segment by segment, both passes."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *inputs, state, chunk, keep = args
        q, k, v = inputs[:3]
        out = q.new_empty(*q.shape[:3], v.shape[3])
        memory = state.flatten(0, 1)
        saved: list[Tensor | None] = []
        ctx.chunk, ctx.recompute = chunk, k.shape[1] > _RECOMPUTE_TOKENS
        for span in _spans(k.shape[1], chunk):
            seg = _solve(memory, chunk, *_cut(inputs, span))
            _write_rows(_answers(seg, chunk), out[:, span], k.shape[2], chunk)
            if keep:
                saved += [memory] if ctx.recompute else seg
            memory = seg.states[-1].clone()
        ctx.save_for_backward(*inputs, *saved)
        return out, memory.view(state.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        kept, chunk = ctx.saved_tensors, ctx.chunk  # read once: under checkpointing a second read is an error
        inputs, saved = kept[:5], kept[5:]
        heads, fields = inputs[1].shape[2], len(_Segment._fields)
        grads = [None if x is None else torch.empty_like(x) for x in inputs]
        d_memory = d_state.flatten(0, 1)
        with autocast_off(d_out.device):
            for i, span in reversed(list(enumerate(_spans(d_out.shape[1], chunk)))):
                if ctx.recompute:
                    seg = _solve(saved[i], chunk, *_cut(inputs, span))
                else:
                    seg = _Segment(*saved[i * fields : (i + 1) * fields])
                stacked = _stack(token_rows(d_out[:, span], heads, chunk), d_state.dtype)
                *d_rows, d_memory = _gradients(seg, stacked, d_memory, chunk)
                for grad, d_input in zip(_cut(grads, span), d_rows, strict=True):
                    if grad is not None and d_input is not None:
                        _write_rows(d_input, grad if grad.ndim == 4 else grad.unsqueeze(-1), heads, chunk)
        return (*grads, d_memory.view(d_state.shape), None, None)


def _cut(tensors: Sequence[Any], span: slice) -> list[Any]:
    return [None if x is None else x[:, span] for x in tensors]
