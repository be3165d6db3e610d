"""Kinds of data in unlike shares, and the needle clients that hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednl.data.client_names import numbered_clients
from fednl.data.mixtures import apportion, mixtures
from fednl.data.needles import CLIENTS, build
from fednl.data.partition import partition_rows
from fednl.data.settings import DataSettings

KINDS = list(CLIENTS)
Make = Callable[..., DataSettings]


@given(st.dictionaries(st.sampled_from(KINDS), st.integers(1, 50), min_size=1), st.integers(0, 100))
def test_parts_are_whole_sum_up_and_miss_their_share_by_less_than_one(weights: dict[str, int], number: int) -> None:
    parts = apportion(weights, number)
    assert sum(parts.values()) == number
    total = sum(weights.values())
    assert all(abs(parts[name] - number * weight / total) < 1 for name, weight in weights.items())


@pytest.mark.parametrize("imbalance", [1.0, 50.0])
def test_kinds_add_up_to_what_was_asked_for_and_alpha_says_how_unlike_clients_are(imbalance: float) -> None:
    names = numbered_clients(10)

    def largest_share(alpha: float) -> float:
        dealt = mixtures(KINDS, names, 40, alpha, imbalance, 3)
        assert list(dealt) == names and min(sum(own.values()) for own in dealt.values()) >= 1
        total = Counter[str]()
        for own in dealt.values():
            total.update(own)
        assert abs(sum(total.values()) - 400) <= 4
        assert max(total.values()) / min(total.values()) == pytest.approx(imbalance, rel=0.3)
        return sum(max(own.values()) / sum(own.values()) for own in dealt.values()) / len(dealt)

    assert largest_share(0.1) > largest_share(1.0) > largest_share(1000.0)


def test_needle_clients_train_and_are_tested_by_the_same_shares(settings: Make, tokenizer: Any) -> None:
    few = {
        "clients": 3,
        "train": 8,
        "validation": 2,
        "test": 4,
        "dirichlet_alpha": 0.3,
        "hold_out_clients": ("client-03",),
    }
    clients = build(settings(**few), tokenizer, 120, "candidates", 3)
    dealt = mixtures(KINDS, ["client-01", "client-02"], 8, 0.3, 1.0, 3)
    assert list(clients) == ["client-01", "client-02", "client-03"]
    for name, own in dealt.items():
        assert Counter(one.task for one in clients[name].train) == own
        assert Counter(one.task for one in clients[name].test) == {k: n for k, n in apportion(own, 4).items() if n}
        assert [one.index for one in clients[name].test] == list(range(4))
    held = clients["client-03"]
    assert (len(held.train), len(held.validation), len(held.test)) == (0, 0, 4)
    again = build(settings(**few), tokenizer, 120, "candidates", 3)
    assert partition_rows(again) == partition_rows(clients)
    assert partition_rows(build(settings(**few), tokenizer, 120, "candidates", 4)) != partition_rows(clients)


def test_without_training_examples_clients_still_have_tests(settings: Make, tokenizer: Any) -> None:
    empty = {"clients": 2, "train": 0, "validation": 0, "test": 3, "dirichlet_alpha": 0.5}
    clients = build(settings(**empty), tokenizer, 120, "candidates", 3)
    assert [(len(own.train), len(own.test)) for own in clients.values()] == [(0, 3), (0, 3)]
