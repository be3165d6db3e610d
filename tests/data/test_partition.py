"""Who holds what."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednl.data import task
from fednl.data.examples import Splits
from fednl.data.partition import dirichlet, partition_rows
from fednl.errors import SettingsError


def test_every_split_of_every_client_is_listed(clients: dict[str, Splits]) -> None:
    rows = partition_rows({**clients, "nobody": Splits([], [], [])})
    assert [(row.client, row.split) for row in rows] == [
        (name, split) for name in [*clients, "nobody"] for split in ("train", "validation", "test")
    ]
    assert [row.n for row in rows][:3] == [40, 4, 4]
    assert rows[0].tokens == 40 * 700
    assert [(row.n, row.tokens) for row in rows[-3:]] == [(0, 0)] * 3
    filled = [row.sha256 for row in rows[:-3]]
    assert len(set(filled)) == len(filled)
    assert all(len(row.sha256) == 64 for row in rows)


def test_the_hash_sees_every_token_and_the_answer(clients: dict[str, Splits]) -> None:
    first = clients["passkey"].train[0]

    def digest(**changes: object) -> str:
        return partition_rows({"c": Splits([replace(first, **changes)], [], [])})[0].sha256  # type: ignore[arg-type]

    same = digest()
    assert same == digest()
    assert digest(prompt_ids=(*first.prompt_ids[:-1], 99)) != same
    assert digest(gold=(first.gold + 1) % 4) != same
    assert digest(candidate_ids=first.candidate_ids[::-1]) != same
    assert digest(removed_ids=first.prompt_ids) != same


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(SettingsError, match=r'data\.task is "needle"; it must be one of: classification, mmlu'):
        task("needle")


@given(
    labels=st.lists(st.integers(0, 4), max_size=60),
    clients=st.integers(1, 12),
    alpha=st.sampled_from([1e-6, 0.01, 0.5, 1.0, 100.0]),
    seed=st.integers(0, 5),
)
def test_a_dirichlet_deal_gives_every_example_to_one_client(
    labels: list[int], clients: int, alpha: float, seed: int
) -> None:
    names = [f"c{i}" for i in range(clients)]
    dealt = dirichlet(labels, names, alpha, seed)
    assert list(dealt) == names
    assert sorted(index for indices in dealt.values() for index in indices) == list(range(len(labels)))
    assert all(indices == sorted(indices) for indices in dealt.values())
    assert dealt == dirichlet(labels, names, alpha, seed)


def test_alpha_says_how_unlike_the_clients_are() -> None:
    labels, names = [0, 1, 2, 3] * 100, [f"c{i}" for i in range(10)]

    def largest_share(alpha: float) -> float:
        """Each client's most frequent label as a share of its examples, averaged over clients and seeds."""
        shares = []
        for seed in range(20):
            for indices in dirichlet(labels, names, alpha, seed).values():
                counts = Counter(labels[i] for i in indices)
                shares += [max(counts.values()) / len(indices)] if indices else []
        return sum(shares) / len(shares)

    few, some, even = (largest_share(alpha) for alpha in (0.05, 0.5, 1000.0))
    assert few > 0.85 > some > 0.45 > even
    assert even < 0.3
    assert dirichlet(labels, names, 0.5, 0) != dirichlet(labels, names, 0.5, 1)


def test_the_first_shares_are_dirichlet() -> None:
    """The share of one of 4 clients has mean 1/4 and variance (1/4)(3/4)/(4 alpha + 1)."""
    names = ["a", "b", "c", "d"]
    shares = [len(dirichlet([0] * 400, names, 0.5, seed)["a"]) / 400 for seed in range(1500)]
    mean = sum(shares) / len(shares)
    variance = sum((share - mean) ** 2 for share in shares) / len(shares)
    assert abs(mean - 0.25) < 0.025  # four standard errors
    assert abs(variance - 0.1875 / 3) < 0.01


def test_a_least_number_is_kept_or_refused_within_the_tries() -> None:
    names = ["a", "b", "c", "d"]
    assert min(map(len, dirichlet([0, 1] * 40, names, 0.5, 0, least=5).values())) >= 5
    with pytest.raises(SettingsError, match=r"80 examples cannot be dealt to 4 clients with at least 20 each"):
        dirichlet([0, 1] * 40, names, 0.05, 0, least=20, tries=3)
    with pytest.raises(SettingsError, match=r"with at least 21 each"):
        dirichlet([0, 1] * 40, names, 1e9, 0, least=21, tries=10**9)  # impossible, so said at once
