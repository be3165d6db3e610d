"""Streaming cross-entropy: a long text read piece by piece, its nats per token in bins of position.

Logits exist for one piece at a time, never for the whole text; what is kept is a sum per bin and the bytes of the
cache. The raw level stands beside the change: normalised to its own first bin, a method that reads badly from the start
looks as good as one that reads well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fednl.errors import NonFiniteError, SettingsError
from fednl.evaluation.comparing import compared
from fednl.evaluation.costs import cache_bytes
from fednl.evaluation.rows import Row
from fednl.evaluation.scoring import evaluating, forward
from fednl.evaluation.statistics import bootstrap_mean, told_ends


@dataclass(frozen=True)
class StreamNats:
    """How one text was read.

    Attributes:
        nats: mean cross-entropy of each bin's tokens, in nats per token.
        tokens: how many tokens of each bin were scored: all but the text's first one.
        state_bytes: bytes of the memory state after each bin (with `across_bins` after the piece that its end was read
            in).
        kv_bytes: bytes of all else in the cache then: keys and values, with what it keeps beside them.
    """

    nats: tuple[float, ...]
    tokens: tuple[int, ...]
    state_bytes: tuple[int, ...]
    kv_bytes: tuple[int, ...]


def stream_nats(
    model: nn.Module,
    ids: Sequence[int],
    *,
    make_cache: Callable[[nn.Module], Any],
    bin_tokens: int = 1024,
    piece_tokens: int = 256,
    across_bins: bool = False,
    on_read: Callable[[int], None] | None = None,
) -> StreamNats:
    """Reads a text token after token, as a conversation would be, and says how well each bin was foreseen.

    A token belongs to the bin of its own position, and is scored once, from all before it that the model still sees.
    Cross-entropies are taken in float32 and summed in float64. No gradient is recorded.

    Args:
        model: a causal language model, attached to a memory or not.
        ids: the text's tokens, at least two.
        make_cache: makes an empty cache for the model.
        bin_tokens: tokens a bin; the last one may be shorter.
        piece_tokens: tokens a pass, at least 1: bounds the logits that exist at once; no result depends on it.
        across_bins: whether a piece may hold several bins, which is faster where these are short. Otherwise it ends
            with its bin, so that the cache is looked at there.
        on_read: called with the number of tokens read so far.

    Raises:
        NonFiniteError: a logit is not a finite number.

    Source: the streaming probe of arXiv 2605.16350, section 3; its bins and which tokens count are not stated.
    """
    if bin_tokens < 1 or piece_tokens < 1 or len(ids) < 2:
        raise ValueError("streaming needs at least two tokens, and bins and pieces of at least one")
    device = next(model.parameters()).device
    text = torch.tensor([list(ids)], device=device)
    bins = -(-len(ids) // bin_tokens)
    sums, counts, sizes = [0.0] * bins, [0] * bins, [(0, 0)] * bins
    cache = make_cache(model)
    with evaluating(model):
        first = 0
        while first < len(ids):
            bin_end = len(ids) if across_bins else (first // bin_tokens + 1) * bin_tokens
            last = min(first + piece_tokens, bin_end, len(ids))
            piece = text[:, first:last]
            logits = forward(model, piece, torch.ones_like(piece), cache, first, keep=0)[0]
            targets = text[0, first + 1 : last + 1]
            losses = _nats(logits[: len(targets)], targets)
            for place, loss in enumerate(losses.tolist(), first + 1):
                sums[place // bin_tokens] += loss
                counts[place // bin_tokens] += 1
            for place in range(first // bin_tokens, (last - 1) // bin_tokens + 1):
                sizes[place] = cache_bytes(cache)
            if on_read is not None:
                on_read(last)
            first = last
    means = tuple(total / count if count else 0.0 for total, count in zip(sums, counts, strict=True))
    states, rest = zip(*sizes, strict=True)
    return StreamNats(means, tuple(counts), states, rest)


def coarser(read: StreamNats, bins: int) -> StreamNats:
    """Puts so many bins together into one each; the last one may hold fewer.

    Args:
        read: how a text was read.
        bins: how many become one, at least 1.
    """
    firsts = range(0, len(read.nats), bins)
    tokens = tuple(sum(read.tokens[first : first + bins]) for first in firsts)
    sums = (
        math.fsum(nats * count for nats, count in zip(read.nats[first:last], read.tokens[first:last], strict=True))
        for first, last in ((first, first + bins) for first in firsts)
    )
    means = tuple(total / count if count else 0.0 for total, count in zip(sums, tokens, strict=True))
    lasts = [min(first + bins, len(read.nats)) - 1 for first in firsts]
    states, rest = (tuple(sizes[last] for last in lasts) for sizes in (read.state_bytes, read.kv_bytes))
    return StreamNats(means, tokens, states, rest)


def strided_nats(model: nn.Module, ids: Sequence[int], context: int, stride: int) -> float:
    """Gives the mean cross-entropy of a text that is longer than the model's context, by windows that overlap.

    Each token but the first is scored once, from at least `context - stride` tokens before it where there are so many;
    a text that fits is one pass. It is what a model without memory and without a window can do with a long text.

    Args:
        model: a causal language model.
        ids: the text's tokens, at least two.
        context: tokens a window, at least 2.
        stride: how far a window moves on, from 1 to `context - 1`.

    Source: the strided perplexity of Hugging Face's documentation, in nats.
    """
    if not 1 <= stride < context or len(ids) < 2:
        raise ValueError("strided scoring needs two tokens and 1 <= stride < context")
    text = torch.tensor([list(ids)], device=next(model.parameters()).device)
    total, scored = 0.0, 1  # the first token has nothing before it
    with evaluating(model):
        end = min(context, len(ids))
        while scored < len(ids):
            first = max(0, end - context)
            logits = model(input_ids=text[:, first:end], use_cache=False).logits[0]
            losses = _nats(logits[scored - 1 - first : -1], text[0, scored:end])
            total += float(losses.sum())
            scored, end = end, min(end + stride, len(ids))
    return total / (len(ids) - 1)


def streaming_rows(
    arms: Mapping[str, Sequence[StreamNats]],
    *,
    seed: int,
    bin_tokens: int = 1024,
    pairs: Sequence[tuple[str, str]] = (("federated", "window-only"),),
) -> list[Row]:
    """Makes the rows of a comparison on the same texts: each arm's bins, their change, and paired differences.

    Args:
        arms: arm -> how it read each text, the texts in the same order for all.
        seed: the run's seed; also names the bootstrap's random stream.
        bin_tokens: as in `stream_nats`.
        pairs: which arms are compared, first minus second, where both were measured.

    Returns:
        Rows `{method, metric, bin, from_token, value, n, low, high, seed}` with the metric `nats_per_token`;
        `change_percent`, of a text's bin against its own first one that has a token, averaged; and `difference` with
        `baseline` and `verdict`. `state_bytes` and `kv_bytes` are the largest over the texts. Intervals are over texts,
        at 95%, where there are three that vary (`fednl.evaluation.statistics.told_ends`). A bin in which no token is
        scored has no row.

    Raises:
        SettingsError: two arms read different texts.
    """
    rows: list[Row] = []
    for arm, read in arms.items():
        places = _scored(read)
        for place in places:
            common: Row = {"method": arm, "bin": place, "from_token": place * bin_tokens, "n": len(read), "seed": seed}
            sizes = {key: max(getattr(one, key)[place] for one in read) for key in ("state_bytes", "kv_bytes")}
            rows.append(common | _mean("nats_per_token", [one.nats[place] for one in read], seed) | sizes)
            firsts = [one.nats[places[0]] for one in read]
            if all(firsts):  # a text that is foreseen from the start changes by no share of that
                change = [100 * (one.nats[place] / first - 1) for one, first in zip(read, firsts, strict=True)]
                rows.append(common | _mean("change_percent", change, seed))
    for first, second in pairs:
        if first not in arms or second not in arms:
            continue
        a, b = arms[first], arms[second]
        if [one.tokens for one in a] != [one.tokens for one in b]:
            raise SettingsError(f'arms "{first}" and "{second}" read other texts; measure both again.')
        for place in _scored(a):
            x, y = ({"": [one.nats[place] for one in arm]} for arm in (a, b))
            found = compared(x, y, seed, shares=False)
            row: Row = {"method": first, "baseline": second, "metric": "difference", "of": "nats_per_token"}
            row |= {"bin": place, "from_token": place * bin_tokens, "value": found.gap.mean, "n": found.gap.n}
            rows.append(row | {"seed": seed, **found.ends} | ({"verdict": found.verdict} if found.verdict else {}))
    return rows


def _scored(read: Sequence[StreamNats]) -> list[int]:
    """The bins that every text has tokens in; its first token is not scored, so that a bin of it alone has none."""
    shortest = min((len(one.nats) for one in read), default=0)
    return [place for place in range(shortest) if all(one.tokens[place] for one in read)]


def _mean(metric: str, values: Sequence[float], seed: int) -> Row:
    mean = bootstrap_mean(values, seed)
    return {"metric": metric, "value": mean.value, **told_ends(mean, {"": values})}


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none").cpu().double()
    if not bool(losses.isfinite().all()):
        raise NonFiniteError("a logit is not a finite number, so the text was not scored; use dtype = float32.")
    return losses
