"""Clients of unlike LoRA ranks: who gets what, and what the mean of the replies is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednl.errors import SettingsError
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.algorithms.flexlora import FlexLora
from fednl.federation.algorithms.scaffold import Scaffold
from fednl.federation.combine import WeightedMean
from fednl.federation.lora_ranks import RankedMean, Ranks, check_lora, cut, padded
from fednl.federation.params import Params, equal

A, B, GATE = "layers.0.q_proj.lora_A", "layers.0.q_proj.lora_B", "layers.0.memory.gate.bias"


def full(rank: int = 4, seed: int = 0) -> Params:
    rng = torch.Generator().manual_seed(seed)
    shapes = {A: (rank, 3), B: (5, rank), GATE: (2,)}
    return {name: torch.randn(shape, generator=rng, dtype=torch.float64) for name, shape in shapes.items()}


def test_the_first_pattern_that_fits_says_the_rank() -> None:
    ranks = Ranks(["passkey=2", "*-code=3"])
    assert [ranks.of(client) for client in ("passkey", "uuid-code", "name-date")] == [2, 3, None]
    assert Ranks().of("passkey") is None


def test_a_client_gets_the_leading_components_and_other_rules_whole() -> None:
    params = full()
    got = cut(params, 2)
    assert torch.equal(got[A], params[A][:2]) and torch.equal(got[B], params[B][:, :2])
    assert got[GATE] is params[GATE]
    assert equal(cut(params, None), params)
    assert equal(cut(params, 99), params)


def test_zero_components_neither_change_the_product_nor_learn() -> None:
    params = full()
    wide = padded(cut(params, 2), params)
    assert {name: t.shape for name, t in wide.items()} == {name: t.shape for name, t in params.items()}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in wide.items()}
    (leaves[B] @ leaves[A]).sin().sum().backward()  # type: ignore[no-untyped-call]
    assert leaves[A].grad is not None and leaves[B].grad is not None
    assert leaves[A].grad[:2].any() and not leaves[A].grad[2:].any()
    assert leaves[B].grad[:, :2].any() and not leaves[B].grad[:, 2:].any()
    assert padded(params, params)[A] is params[A]


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 9)), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_with_one_rank_for_all_it_is_the_weighted_mean_to_the_bit(clients: list[tuple[int, int]]) -> None:
    ranked, plain = RankedMean(full()), WeightedMean()
    for weight, seed in clients:
        ranked.add(full(seed=seed), weight)
        plain.add(full(seed=seed), weight)
    assert equal(ranked.result(), plain.result())
    assert ranked.weight == plain.weight


def test_a_component_counts_once_for_those_who_have_it() -> None:
    mean, low, high = RankedMean(full(seed=9)), full(1, seed=1), full(3, seed=2)
    mean.add(low, 3)
    mean.add(high, 1)
    mean.add(full(seed=3), 0)
    got = mean.result()
    torch.testing.assert_close(got[A][0], (3 * low[A][0] + high[A][0]) / 4)
    torch.testing.assert_close(got[B][:, 0], (3 * low[B][:, 0] + high[B][:, 0]) / 4)
    # Only the second client has components 1 and 2: the product's share of them is its weight, once.
    torch.testing.assert_close(got[A][1:3], high[A][1:3])
    torch.testing.assert_close(got[B][:, 1:3], high[B][:, 1:3] / 4)
    # Nobody has the last: it stays as it was in A, so that it can still be trained, and has no vote for B.
    assert torch.equal(got[A][3], full(seed=9)[A][3]) and not got[B][:, 3].any()
    torch.testing.assert_close(got[GATE], (3 * low[GATE] + high[GATE]) / 4)
    assert equal(mean.result(), got)


@pytest.mark.parametrize(
    ("algorithm", "shared", "entries", "words"),
    [
        (FedAvg(shared="all"), [A, B, GATE], ["pasky=2"], 'lora-ranks names "pasky=2"'),
        (FedAvg(shared="memory"), [GATE], ["passkey=2"], 'add "lora"'),
        (Scaffold(shared="all"), [A, B, GATE], ["passkey=2"], "Scaffold sends tensors"),
        (FlexLora(shared="memory"), [GATE], [], "no pair of LoRA factors"),
        (FlexLora(shared=("gate", B)), [B, GATE], [], "no pair of LoRA factors"),
    ],
)
def test_what_makes_no_sense_is_refused(algorithm: FedAvg, shared: list[str], entries: list[str], words: str) -> None:
    params = full()
    with pytest.raises(SettingsError, match=words):
        check_lora(algorithm, {name: params[name] for name in shared}, params, entries, ["name-date", "passkey"])
