"""Products of LoRA factors against dense matrices, and what averaging the factors one by one misses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fednl.federation.lora_products import ProductMean, errors, joined, pairs, truncated
from fednl.federation.params import Params, weighted_mean

SITE = "layers.0.q_proj"
A, B = f"{SITE}.lora_A", f"{SITE}.lora_B"
sizes = st.integers(1, 7)


def factors(rank: int, outputs: int, inputs: int, seed: int) -> Params:
    rng = torch.Generator().manual_seed(seed)
    draw = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((rank, inputs), (outputs, rank))]
    return {A: draw[0], B: draw[1]}


def product(params: Params) -> Tensor:
    return params[B] @ params[A]


def mean_of(replies: list[tuple[Params, float]]) -> Params:
    mean = ProductMean()
    for params, weight in replies:
        mean.add(params, weight)
    return mean.result()


@given(st.lists(st.tuples(sizes, st.integers(1, 1000), st.integers(0, 99)), min_size=1, max_size=5), sizes, sizes)
@settings(max_examples=60, deadline=None)
def test_the_mean_product_is_exact_whatever_the_ranks(
    clients: list[tuple[int, int, int]], outputs: int, inputs: int
) -> None:
    replies = [(factors(rank, outputs, inputs, seed), float(weight)) for rank, weight, seed in clients]
    mean = mean_of(replies)
    dense = sum(product(params) * weight for params, weight in replies) / sum(weight for _, weight in replies)
    torch.testing.assert_close(product(mean), dense, rtol=1e-12, atol=1e-12)
    # The factors never outgrow the projection.
    assert len(mean[A]) <= max(*(rank for rank, _, _ in clients), min(outputs, inputs))


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 99)), min_size=2, max_size=5))
@settings(max_examples=40, deadline=None)
def test_the_error_of_separate_means_is_that_of_the_dense_matrices(clients: list[tuple[int, int]]) -> None:
    replies = [(factors(2, 6, 5, seed), float(weight)) for weight, seed in clients]
    before, taken = factors(2, 6, 5, 1000), weighted_mean(replies)
    exact = weighted_mean(({"": product(params)}, weight) for params, weight in replies)[""]
    missed = torch.linalg.norm(exact - product(taken))
    measured = errors(mean_of(replies), taken, before)
    assert measured["lora_error"] == pytest.approx(float(missed / torch.linalg.norm(exact)), rel=1e-9, abs=1e-14)
    moved = torch.linalg.norm(exact - product(before))
    assert measured["lora_error_of_update"] == pytest.approx(float(missed / moved), rel=1e-9, abs=1e-14)


def test_two_clients_by_hand() -> None:
    # Opposite signs in both factors: the products agree, the mean factors vanish, and averaging loses everything.
    one = {A: torch.tensor([[1.0, 0.0]]), B: torch.tensor([[2.0], [0.0]])}
    other = {name: -tensor for name, tensor in one.items()}
    taken = weighted_mean([(one, 1), (other, 1)])
    assert errors(mean_of([(one, 1), (other, 1)]), taken, one)["lora_error"] == pytest.approx(1.0, abs=1e-15)
    # What the round changed is nothing here, so no share of it is told.
    assert "lora_error_of_update" not in errors(mean_of([(one, 1), (other, 1)]), taken, one)
    # The error is the covariance of B and A: p (1 - p) |b1 - b2| |a1 - a2| over |p b1 a1 + (1 - p) b2 a2|.
    third = {A: torch.tensor([[0.0, 3.0]]), B: torch.tensor([[2.0], [4.0]])}
    replies = [(one, 1.0), (third, 3.0)]
    expected = 0.25 * 0.75 * 4.0 * 10**0.5 / (0.5**2 + 4.5**2 + 9.0**2) ** 0.5
    assert errors(mean_of(replies), weighted_mean(replies), one)["lora_error"] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("frozen", [A, B])
def test_a_frozen_factor_leaves_no_error(frozen: str) -> None:
    start = factors(2, 6, 5, 0)
    replies = [({**factors(2, 6, 5, seed), frozen: start[frozen]}, float(seed)) for seed in (1, 2, 3)]
    assert errors(mean_of(replies), weighted_mean(replies), start)["lora_error"] < 1e-14


def test_one_client_and_equal_clients_leave_no_error() -> None:
    params = factors(3, 6, 5, 0)
    for replies in ([(params, 4.0)], [(params, 1.0), (params, 2.0)]):
        assert errors(mean_of(replies), weighted_mean(replies), factors(3, 6, 5, 1))["lora_error"] < 1e-14


def test_nothing_is_measured_where_nothing_is_averaged() -> None:
    alone = {A: torch.ones(1, 2)}
    assert pairs(alone) == []
    assert errors(mean_of([(alone, 1.0)]), alone, alone) == {}
    empty = {A: torch.ones(1, 2), B: torch.zeros(3, 1)}
    assert mean_of([(empty, 0.0)]) == {}
    assert errors(mean_of([(empty, 1.0)]), empty, empty) == {}  # the product is zero: no denominator


@given(sizes, sizes, sizes, sizes, st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_the_bounded_rank_is_the_best_there_is(rank: int, have: int, outputs: int, inputs: int, seed: int) -> None:
    exact, like = factors(have, outputs, inputs, seed), factors(rank, outputs, inputs, seed + 1)[A]
    left, right = truncated(exact[B], exact[A], like)
    assert (left.shape, right.shape) == ((outputs, rank), (rank, inputs))
    values = torch.linalg.svdvals(product(exact))
    lost = torch.linalg.norm(product(exact) - left @ right)
    assert float(lost) == pytest.approx(float(torch.linalg.norm(values[rank:])), abs=1e-10)
    # The leading components are the best of their own rank, which is what a client of a lower rank gets.
    for lower in range(1, rank + 1):
        lost = torch.linalg.norm(product(exact) - left[:, :lower] @ right[:lower])
        assert float(lost) == pytest.approx(float(torch.linalg.norm(values[lower:])), abs=1e-10)


def test_the_bounded_factors_keep_the_scale_and_can_all_be_trained() -> None:
    exact, like = factors(2, 6, 5, 0), 0.3 * factors(4, 6, 5, 1)[A]
    left, right = truncated(exact[B], exact[A], like)
    assert torch.equal(right[2:], like[2:]) and not left[:, 2:].any()  # the product has rank 2 only
    torch.testing.assert_close(
        right[:2] @ right[:2].T, torch.eye(2, dtype=torch.float64) * like.square().sum(1).mean(), rtol=1e-12, atol=1e-12
    )
    left, right = truncated(torch.zeros(6, 2), torch.zeros(2, 5), like)
    assert not left.any() and bool(right.any(1).all())


def test_joined_factors_add_their_products() -> None:
    one, other = factors(2, 6, 5, 0), factors(3, 6, 5, 1)
    torch.testing.assert_close(product(joined(one, other)), product(one) + product(other))
