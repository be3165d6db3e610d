from __future__ import annotations

import itertools
import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st

from fednl.seeding import python_rng, seed_of, torch_rng

FIELDS = st.tuples(st.integers(-(2**40), 2**40), st.text(max_size=8), st.text(max_size=8), st.integers(0, 10**6))


@given(FIELDS)
def test_a_stream_is_named_by_a_63_bit_number(fields: tuple[int, str, str, int]) -> None:
    number = seed_of(*fields)
    assert 0 <= number < 2**63
    assert number == seed_of(*fields)


@given(FIELDS, FIELDS)
def test_different_names_give_different_streams(a: tuple[int, str, str, int], b: tuple[int, str, str, int]) -> None:
    assert (seed_of(*a) == seed_of(*b)) == (a == b)


def test_fields_do_not_run_into_each_other() -> None:
    assert seed_of(0, "a", "b|c") != seed_of(0, "a|b", "c")
    assert seed_of(1, "x", "", 23) != seed_of(12, "x", "", 3)


def test_the_numbers_never_change() -> None:
    # A changed number changes every run made before: these are part of the format.
    assert seed_of(0, "batches") == 4676732490885406047
    assert seed_of(7, "sampling", "client-ü", 3) == 613912661352839888


def test_the_same_in_another_process() -> None:
    code = "from fednl.seeding import seed_of; print(seed_of(3, 'init', 'law', 2))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(out) == seed_of(3, "init", "law", 2)


def test_generators_repeat_and_differ() -> None:
    draws = {
        (client, round): tuple(torch.rand(4, generator=torch_rng(0, "batches", client, round)).tolist())
        for client, round in itertools.product(("a", "b"), (0, 1))
    }
    assert len(set(draws.values())) == 4
    assert draws["a", 1] == tuple(torch.rand(4, generator=torch_rng(0, "batches", "a", 1)).tolist())
    assert python_rng(0, "x").random() == python_rng(0, "x").random()
    assert python_rng(0, "x").random() != python_rng(0, "y").random()


def test_global_generators_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    torch_rng(0, "batches")
    assert torch.equal(torch.rand(1), expected)
