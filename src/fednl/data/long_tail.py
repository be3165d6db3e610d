"""Long tails: a few kinds of data with many examples, many kinds with few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fednl.seeding import python_rng

THIRDS = ("head", "middle", "tail")


def long_tail(kinds: Sequence[str], most: int, imbalance: float, seed: int) -> dict[str, int]:
    """Gives each kind its number of training examples, falling exponentially from the first to the last.

    The kind at place i of K, in an order drawn by seed, has `most * imbalance ** (-i / (K - 1))` examples, rounded,
    and at least 1 where `most` is at least 1: the first has `imbalance` times as many as the last.

    Args:
        kinds: domains or labels, each once.
        most: examples of the largest kind, at least 0.
        imbalance: the largest number over the smallest, at least 1; 1 gives all the same. 10, 50 and 100 are usual.
        seed: the run's seed.

    Returns:
        Kind -> examples, in the order given.

    Source: Cui et al. 2019 (arXiv 1901.05555), section 5.1, by factor as Cao et al. 2019 (arXiv 1906.07413).
    """
    order = list(kinds)
    python_rng(seed, "partition/long-tail").shuffle(order)
    steps = max(1, len(order) - 1)
    counts = {kind: max(min(1, most), round(most * imbalance ** (-i / steps))) for i, kind in enumerate(order)}
    return {kind: counts[kind] for kind in kinds}


def scaled_long_tail(kinds: Sequence[str], total: int, imbalance: float, seed: int) -> dict[str, int]:
    """Gives each kind its number of examples so that all together are about `total`: `long_tail`, scaled and rounded.

    Args:
        kinds: as in `long_tail`.
        total: examples of all kinds together, at least 0.
        imbalance: as in `long_tail`.
        seed: the run's seed.
    """
    shape = long_tail(kinds, 10**6, imbalance, seed)
    return {kind: round(total * share / sum(shape.values())) for kind, share in shape.items()}


def thirds(counts: Mapping[str, int]) -> dict[str, list[str]]:
    """Splits clients or kinds into head, middle and tail by their examples; empty where they do not differ.

    Args:
        counts: name -> training examples; at least three names, else the result is empty.

    Returns:
        `head`, `middle` and `tail`, each a list of names from most to fewest examples; head and tail are equally long.
    """
    if len(counts) < len(THIRDS) or len(set(counts.values())) == 1:
        return {}
    order = sorted(counts, key=lambda name: (-counts[name], name))
    size = round(len(order) / len(THIRDS))
    parts = (order[:size], order[size : len(order) - size], order[len(order) - size :])
    return dict(zip(THIRDS, parts, strict=True))
