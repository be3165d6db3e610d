"""TTT-Linear: the memory is a small model, `z -> [z, 1] W`, that every token trains a little before it is asked.

Per sequence and key/value head. W = start + S, where `start` is learned beforehand and S, the state, begins at zero;
the last row of W is the bias. With LN the layer norm over a vector's numbers, times `scale`, plus `shift`, a token's
loss is

    l(W) = |LN([k, 1] W) - (v - k)|^2 / 2.

Tokens are taken in mini-batches of B, all of whose gradients are of the W that the mini-batch began with:

    W_i = W_0 - (1 / i) sum_{j <= i} beta_j grad l_j(W_0)      after its i-th token, i = 1 .. B
    o_i = q_i + LN([q_i, 1] W_i)                               its answer, after its write

and the next mini-batch begins with W_B. `ttt_linear_reference` does this token by token and is the specification;
`ttt_linear_rule` takes a mini-batch at a time, over which the reads are products of matrices. What is carried on is
S, the sum so far within the mini-batch (`gathered`) and i (`taken`), so that a sequence may be cut anywhere.

Source: Sun et al. 2024, "Learning to (Learn at Test Time)" (arXiv 2407.04620), sections 2.4 to 2.7. There, too, beta
belongs to the token that writes; the kernels of flash-linear-attention take that of the token that reads, which is the
same where beta is one for all tokens, and add [q, 1] W where the paper adds q. S apart from the start is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fednl.memory.arguments import autocast_off, check_argument, check_arguments, compute_dtype, unflatten

NORM_EPSILON = 1e-6
Result = tuple[Tensor, Tensor, Tensor, Tensor]


def ttt_linear_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    start: Tensor,
    scale: Tensor,
    shift: Tensor,
    keep: Tensor | None = None,
    state: Tensor | None = None,
    gathered: Tensor | None = None,
    taken: Tensor | None = None,
    batch_tokens: int = 16,
) -> Result:
    """Trains and asks the inner model one token at a time: the specification of `ttt_linear_rule`.

    Arguments, results and errors are those of `ttt_linear_rule`.

    Source: arXiv 2407.04620, as in the head of this file.
    """
    given, memory = _checked(q, k, v, beta, start, scale, shift, keep, state, gathered, taken, batch_tokens)
    outs = []
    with autocast_off(q.device):
        for token, real in zip(given.pieces([1] * k.shape[1]), given.keep.unbind(1), strict=True):
            inner = given.start + memory.state
            total = memory.gathered + token.key.mT @ (token.beta * _loss_gradient(token, inner, given))
            total = torch.where(_wide(real), total, memory.gathered)
            taken_now = memory.taken + real
            updated = inner - total / _wide(taken_now.clamp(min=1))
            outs.append(_answer(token.query, token.query_one @ updated.unsqueeze(2), given))
            memory = _next(Carried(memory.state, total, taken_now), batch_tokens)
        return _joined(outs, q, memory)


def ttt_linear_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    start: Tensor,
    scale: Tensor,
    shift: Tensor,
    keep: Tensor | None = None,
    state: Tensor | None = None,
    gathered: Tensor | None = None,
    taken: Tensor | None = None,
    batch_tokens: int = 16,
) -> Result:
    """Trains the inner model of TTT-Linear on a sequence, and asks it at every token.

    Query head h asks the model of KV head h // (query_heads / kv_heads). No argument is modified. Computes in float32,
    or in float64 if any floating-point argument is float64, also under autocast. Time and memory grow linearly with
    the tokens; plain autograd, of any order.

    Args:
        q: Queries, [batch, tokens, query_heads, dim].
        k, v: Keys and values, [batch, tokens, kv_heads, dim]; kv_heads divides query_heads.
        beta: Step sizes, [batch, tokens, kv_heads], at least 0; above, no bound is known, since the layer norm divides
            by what the inner model gives.
        start: What the inner model begins with, [kv_heads, dim + 1, dim], the bias last. With all zeros the first
            gradients are a thousand times too long: LN divides by the spread of [k, 1] W, which is then none.
        scale, shift: Of the layer norm, [kv_heads, dim].
        keep: [batch, tokens] bool, False for a pad, which changes nothing; None if all is real.
        state: What the inner model has learned so far, [batch, kv_heads, dim + 1, dim]. None means zeros.
        gathered: The sum of the mini-batch so far, as `state`. None means zeros.
        taken: How many tokens of the mini-batch it is of, int64 [batch], in 0 .. batch_tokens - 1. None means zeros.
        batch_tokens: Tokens of a mini-batch, at least 1. Changes the result: 1 is online gradient descent.

    Returns:
        The answers, [batch, tokens, query_heads, dim] in q's dtype; then `state`, `gathered` and `taken` after the
        last token.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, beta is negative, or batch_tokens is below 1.

    Source: arXiv 2407.04620, as in the head of this file.
    """
    given, memory = _checked(q, k, v, beta, start, scale, shift, keep, state, gathered, taken, batch_tokens)
    outs = []
    with autocast_off(q.device):
        sizes = _sizes(k.shape[1], memory.taken, batch_tokens)
        for token, real in zip(given.pieces(sizes), given.keep.split(sizes, 1), strict=True):
            reached = memory.taken.unsqueeze(1) + real.cumsum(1)
            here = reached <= batch_tokens  # the others begin the next mini-batch
            out, memory = _train(token, real & here, memory, given, batch_tokens)
            if not bool(here.all()):
                after, memory = _train(token, real & ~here, memory, given, batch_tokens)
                out = torch.where(here[:, None, None, :, None], out, after)
            outs.append(out)
        return _joined(outs, q, memory)


class Carried(NamedTuple):
    """What is carried from token to token: `state`, `gathered`, `taken` as in `ttt_linear_rule`."""

    state: Tensor
    gathered: Tensor
    taken: Tensor


class Tokens(NamedTuple):
    """Some tokens, head by head; C of them."""

    query: Tensor
    """`[batch, kv_heads, group, C, dim]`"""
    query_one: Tensor
    """The same with a 1 at the end, for the bias."""
    key: Tensor
    """`[batch, kv_heads, C, dim + 1]`, the 1 at its end"""
    target: Tensor
    """`[batch, kv_heads, C, dim]`: v - k"""
    beta: Tensor
    """`[batch, kv_heads, C, 1]`"""


class Given(NamedTuple):
    """Checked arguments in the dtype computed in, head by head."""

    whole: Tokens
    keep: Tensor
    start: Tensor
    scale: Tensor
    """`[kv_heads, 1, dim]`, as is `shift`"""
    shift: Tensor

    def pieces(self, sizes: list[int]) -> Iterator[Tokens]:
        """Takes the sequence apart, once: cutting it anew for each piece makes the backward pass quadratic."""
        return map(Tokens._make, zip(*(x.split(sizes, -2) for x in self.whole), strict=True))


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    start: Tensor,
    scale: Tensor,
    shift: Tensor,
    keep: Tensor | None,
    state: Tensor | None,
    gathered: Tensor | None,
    taken: Tensor | None,
    batch_tokens: int,
) -> tuple[Given, Carried]:
    check_arguments(q, k, v, beta, None, None, None)
    (batch, tokens, heads, dim), inner = k.shape, (k.shape[2], k.shape[3] + 1, k.shape[3])
    if v.shape[3] != dim:
        raise ValueError(f"v has dimension {v.shape[3]}, but keys and values must have the same, {dim}")
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, not {batch_tokens}")
    for name, tensor, shape in (
        ("start", start, inner),
        ("scale", scale, (heads, dim)),
        ("shift", shift, (heads, dim)),
        ("state", state, (batch, *inner)),
        ("gathered", gathered, (batch, *inner)),
    ):
        check_argument(name, tensor, shape, k, v)
    check_argument("taken", taken, (batch,), k, v, "int64")
    check_argument("keep", keep, (batch, tokens), k, v, "bool")
    dtype = compute_dtype(q, k, v, beta, start, scale, shift, state, gathered)
    with autocast_off(q.device):
        query = unflatten(q.to(dtype), 2, heads).permute(0, 2, 3, 1, 4)
        key, value = (x.to(dtype).transpose(1, 2) for x in (k, v))
        rate = beta.to(dtype).transpose(1, 2).unsqueeze(-1)
        whole = Tokens(query, _with_one(query), _with_one(key), value - key, rate)
        zeros = torch.zeros(batch, *inner, dtype=dtype, device=k.device)
        learned, so_far = (zeros if x is None else x.to(dtype) for x in (state, gathered))
        count = torch.zeros(batch, dtype=torch.int64, device=k.device) if taken is None else taken
        real = torch.ones(batch, tokens, dtype=torch.bool, device=k.device) if keep is None else keep
        norm = (x.to(dtype).unsqueeze(1) for x in (scale, shift))
        return Given(whole, real, start.to(dtype), *norm), Carried(learned, so_far, count)


def _sizes(tokens: int, taken: Tensor, batch_tokens: int) -> list[int]:
    """Cuts the tokens at the ends of the first row's mini-batches, as if all were real."""
    first = min(tokens, batch_tokens - int(taken[0])) if len(taken) else tokens
    sizes = [first, *[batch_tokens] * ((tokens - first) // batch_tokens), (tokens - first) % batch_tokens]
    return [size for size in sizes if size]


def _train(token: Tokens, real: Tensor, memory: Carried, given: Given, batch_tokens: int) -> tuple[Tensor, Carried]:
    """Takes the tokens that are `real [batch, C]`, all of one mini-batch, and asks at every token."""
    inner = given.start + memory.state
    step = token.beta * _loss_gradient(token, inner, given) * real[:, None, :, None]
    reached = (memory.taken.unsqueeze(1) + real.cumsum(1)).clamp(min=1)[:, None, None, :, None]
    scores = (token.query_one @ token.key.mT.unsqueeze(2)).tril()
    moved = token.query_one @ memory.gathered.unsqueeze(2) + scores @ step.unsqueeze(2)
    out = _answer(token.query, token.query_one @ inner.unsqueeze(2) - moved / reached, given)
    total = memory.gathered + token.key.mT @ step
    return out, _next(Carried(memory.state, total, memory.taken + real.sum(1)), batch_tokens)


def _next(memory: Carried, batch_tokens: int) -> Carried:
    """Ends the mini-batches that are full."""
    full = memory.taken == batch_tokens
    ended = memory.state - memory.gathered / batch_tokens
    return Carried(
        torch.where(_wide(full), ended, memory.state),
        memory.gathered.masked_fill(_wide(full), 0.0),
        memory.taken.masked_fill(full, 0),
    )


def _loss_gradient(token: Tokens, inner: Tensor, given: Given) -> Tensor:
    """The gradient of each token's loss to `[k, 1] W`, `[batch, kv_heads, C, dim]`."""
    unit, per_spread = _normed(token.key @ inner)
    outer = given.scale * (given.scale * unit + given.shift - token.target)
    along = unit * (outer * unit).mean(-1, keepdim=True)
    return per_spread * (outer - outer.mean(-1, keepdim=True) - along)


def _answer(query: Tensor, recalled: Tensor, given: Given) -> Tensor:
    """`q + LN(recalled)`."""
    return query + _normed(recalled)[0] * given.scale.unsqueeze(1) + given.shift.unsqueeze(1)


def _normed(x: Tensor) -> tuple[Tensor, Tensor]:
    """The last dimension with mean 0 and variance 1, and what it was multiplied by."""
    apart = x - x.mean(-1, keepdim=True)
    per_spread = torch.rsqrt(apart.square().mean(-1, keepdim=True) + NORM_EPSILON)
    return apart * per_spread, per_spread


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def _wide(x: Tensor) -> Tensor:
    """`[batch]` against `[batch, kv_heads, dim + 1, dim]`."""
    return x[:, None, None, None]


def _joined(outs: list[Tensor], q: Tensor, memory: Carried) -> Result:
    """Answers in order of tokens, `[batch, tokens, query_heads, dim]` in q's dtype, and what is carried on."""
    if not outs:
        return torch.empty_like(q), memory.state.clone(), memory.gathered.clone(), memory.taken.clone()
    return torch.cat(outs, 3).permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype), *memory
