"""Who holds what: dealing examples out unevenly, and one row per client and split without any private text."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fednl.data.examples import Example, Splits
from fednl.errors import SettingsError
from fednl.seeding import python_rng


@dataclass(frozen=True)
class PartitionRow:
    """A client's share of one split.

    Attributes:
        client: the client's name.
        split: `"train"`, `"validation"` or `"test"`.
        n: examples.
        tokens: prompt tokens of all of them together.
        sha256: of all token ids and the right answers, hexadecimal; equal shares have equal hashes.
    """

    client: str
    split: str
    n: int
    tokens: int
    sha256: str


def dirichlet(
    labels: Sequence[Hashable],
    clients: Sequence[str],
    alpha: float,
    seed: int,
    *,
    least: int = 0,
    tries: int = 100,
    purpose: str = "partition/dirichlet",
) -> dict[str, list[int]]:
    """Deals examples out so that clients hold the labels in unlike shares; every example goes to one client.

    For each label the clients' shares are drawn from a symmetric Dirichlet distribution, and the label's examples,
    shuffled, are cut in these shares. Where all labels are equal only the clients' sizes differ. A deal in which a
    client gets fewer than `least` is drawn again as a whole.

    Args:
        labels: one per example.
        clients: their names; a client more is another deal.
        alpha: above 0; small gives a client few labels, large gives everyone the same mixture.
        seed: the run's seed.
        least: examples that every client is to have.
        tries: how many deals are drawn at most, at least 1.
        purpose: names the random stream.

    Returns:
        Client -> indices into `labels`, ascending; clients in the order given, perhaps with an empty list.

    Raises:
        SettingsError: no deal gave every client `least` examples.

    Source: Hsu et al. 2019 (arXiv 1909.06335), section 3, label by label as Yurochkin et al. 2019; bounded tries ours.
    """
    if alpha <= 0 or tries < 1 or not clients:
        raise ValueError("a Dirichlet deal needs alpha above 0, at least one try and at least one client")
    by_label: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels):
        by_label.setdefault(label, []).append(index)
    for attempt in range(tries if least * len(clients) <= len(labels) else 0):
        rng = python_rng(seed, purpose, "", attempt)
        dealt: dict[str, list[int]] = {client: [] for client in clients}
        for indices in by_label.values():
            order = rng.sample(indices, len(indices))
            cuts = [round(len(order) * share) for share in _cumulated_shares(rng, len(clients), alpha)]
            for client, start, end in zip(clients, [0, *cuts], cuts, strict=False):
                dealt[client] += order[start:end]
        if min(map(len, dealt.values())) >= least:
            return {client: sorted(indices) for client, indices in dealt.items()}
    raise SettingsError(
        f"{len(labels)} examples cannot be dealt to {len(clients)} clients with at least {least} each (alpha {alpha}, "
        f"{tries} tries): take fewer clients, a larger alpha or more examples."
    )


def _cumulated_shares(rng: random.Random, clients: int, alpha: float) -> list[float]:
    """A draw from the Dirichlet distribution as running sums, the last exactly 1."""
    weights = [rng.gammavariate(alpha, 1.0) for _ in range(clients)]
    if sum(weights) == 0:  # the gamma variates of a tiny alpha underflow; its limit gives all to one
        weights[rng.randrange(clients)] = 1.0
    *sums, total = accumulate(weights)
    return [*(value / total for value in sums), 1.0]


def partition_rows(clients: Mapping[str, Splits[Any]]) -> list[PartitionRow]:
    """Lists every client's splits, empty ones included.

    Args:
        clients: what a task's `build` returned.
    """
    return [
        _row(name, split, examples)
        for name, splits in clients.items()
        for split, examples in (
            ("train", splits.train),
            ("validation", splits.validation),
            ("test", splits.test),
        )
    ]


def question_digest(one: Example) -> str:
    """Names a question by what is asked: 16 hexadecimal digits; equal questions have equal ones.

    Args:
        one: the question; its tokens, those of its answers and which is right count, not whose it is or its number.
    """
    return hashlib.sha256(_content(one)).hexdigest()[:16]


def _content(one: Example) -> bytes:
    return json.dumps([one.prompt_ids, one.candidate_ids, one.gold, one.removed_ids, *one.further]).encode()


def _row(client: str, split: str, examples: Sequence[Example]) -> PartitionRow:
    digest = hashlib.sha256()
    for one in examples:
        digest.update(_content(one))
    tokens = sum(len(one.prompt_ids) for one in examples)
    return PartitionRow(client, split, len(examples), tokens, digest.hexdigest())
