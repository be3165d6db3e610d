"""Clients that hold several kinds of data in unlike shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fednl.data.long_tail import scaled_long_tail
from fednl.data.partition import dirichlet


def mixtures(
    kinds: Sequence[str], clients: Sequence[str], each: int, alpha: float, imbalance: float, seed: int
) -> dict[str, dict[str, int]]:
    """Deals kinds of data out by a Dirichlet distribution: how many examples of each kind every client has.

    Args:
        kinds: their names, each once.
        clients: who is dealt to; every one gets an example at least, where `each` is at least 1.
        each: examples per client, on average over clients up to rounding.
        alpha: above 0; small gives a client few kinds, large gives everyone the same mixture.
        imbalance: the largest kind over the smallest, over all clients together; 1 for all alike (`long_tail`).
        seed: the run's seed.

    Returns:
        Client -> kind -> examples, kinds without any left out; both in the orders given.

    Raises:
        SettingsError: no deal gave every client an example.
    """
    numbers = scaled_long_tail(kinds, each * len(clients), imbalance, seed)
    labels = [kind for kind, number in numbers.items() for _ in range(number)]
    dealt = dirichlet(labels, clients, alpha, seed, least=min(1, each))
    counts = {client: Counter(labels[i] for i in dealt[client]) for client in clients}
    return {client: {kind: n for kind in kinds if (n := counts[client][kind])} for client in clients}


def apportion(weights: Mapping[str, int], number: int) -> dict[str, int]:
    """Splits a number in proportion to weights, into whole parts that sum up to it.

    Args:
        weights: name -> weight, at least 0 and not all 0.
        number: at least 0.

    Source: Hamilton's method of largest remainders; ties go by the order of the weights.
    """
    total = sum(weights.values())
    parts = {name: number * weight // total for name, weight in weights.items()}
    left = sorted(weights, key=lambda name: number * weights[name] % total, reverse=True)
    for name in left[: number - sum(parts.values())]:
        parts[name] += 1
    return parts
