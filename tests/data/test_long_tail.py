"""A few kinds with many examples, many with few."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednl.data.long_tail import long_tail, thirds
from fednl.data.needles import build
from fednl.data.settings import DataSettings

KINDS = ["a", "b", "c", "d", "e", "f", "g"]


@pytest.mark.parametrize("factor", [10, 50, 100])
def test_the_largest_has_the_factor_times_the_smallest_and_between_it_falls_exponentially(factor: int) -> None:
    counts = sorted(long_tail(KINDS, 1000, factor, 3).values(), reverse=True)
    assert counts[0] == 1000
    assert counts[-1] == round(1000 / factor)
    ratios = [left / right for left, right in pairwise(counts)]
    assert ratios == pytest.approx([factor ** (1 / 6)] * 6, rel=0.05)


@given(st.integers(0, 500), st.floats(1, 1000), st.integers(0, 2**32))
def test_every_kind_keeps_an_example_and_the_seed_alone_says_which_is_large(
    most: int, factor: float, seed: int
) -> None:
    counts = long_tail(KINDS, most, factor, seed)
    assert list(counts) == KINDS
    assert min(counts.values()) >= min(most, 1)
    assert counts == long_tail(KINDS, most, factor, seed)
    assert long_tail(KINDS, most, 1, seed) == dict.fromkeys(KINDS, most)


def test_seeds_put_different_kinds_first() -> None:
    assert len({max(KINDS, key=long_tail(KINDS, 100, 50, seed).__getitem__) for seed in range(20)}) > 3


def test_thirds_go_by_examples_and_equal_counts_have_none() -> None:
    assert thirds({"a": 5, "b": 9, "c": 1, "d": 2, "e": 9, "f": 3, "g": 4}) == {
        "head": ["b", "e"], "middle": ["a", "g", "f"], "tail": ["d", "c"]
    }  # fmt: skip
    assert thirds(dict.fromkeys("abcd", 7)) == {}
    assert thirds({"a": 2, "b": 1}) == {}


def test_needle_clients_get_what_the_long_tail_says_and_the_same_tests(
    settings: Callable[..., DataSettings], tokenizer: Any
) -> None:
    few = {"clients": 3, "train": 20, "validation": 1, "test": 2}
    clients = build(settings(**few, imbalance=10.0), tokenizer, 120, "candidates", 3)
    counts = {client: len(splits.train) for client, splits in clients.items()}
    assert sorted(counts.values()) == [2, 6, 20]
    assert counts == long_tail(sorted(clients), 20, 10, 3)
    equal = build(settings(**few), tokenizer, 120, "candidates", 3)
    for client, splits in clients.items():
        assert splits.train == equal[client].train[: counts[client]]
        assert splits.test == equal[client].test
