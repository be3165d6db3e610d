"""The mean of replies of unlike LoRA ranks, and that one rank for all changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.algorithms.flexlora import FlexLora
from fednl.federation.exchange import CombineSettings
from fednl.federation.lora_combine import LoraCombiner
from fednl.federation.message import Message
from fednl.federation.params import Params, equal
from fednl.federation.robust import make_combiner

A, B, GATE = "layers.0.q_proj.lora_A", "layers.0.q_proj.lora_B", "layers.0.memory.gate.bias"


def full(rank: int = 4, seed: int = 0) -> Params:
    rng = torch.Generator().manual_seed(seed)
    shapes = {A: (rank, 3), B: (5, rank), GATE: (2,)}
    return {name: torch.randn(shape, generator=rng, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "combine",
    [
        CombineSettings(),
        CombineSettings(weights="uniform"),
        CombineSettings(max_examples=3, norm_cap=0.5),
        CombineSettings(rule="median"),
    ],
)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 9)), min_size=1, max_size=6))
@settings(max_examples=15, deadline=None)
def test_with_one_rank_for_all_it_is_the_rule_of_the_settings_to_the_bit(
    combine: CombineSettings, clients: list[tuple[int, int]]
) -> None:
    ranked, plain = LoraCombiner(FedAvg(shared="all"), combine, full(), 6), make_combiner(combine, full(), 6)
    for weight, seed in clients:
        for combiner in (ranked, plain):
            combiner.add(Message(full(seed=seed), num_examples=weight))
    assert ranked.fault() == plain.fault()
    assert ranked.facts() == plain.facts()
    if not plain.fault():
        assert equal(ranked.result().params, plain.result().params)
        assert (ranked.result().extra, ranked.result().num_examples) == ({}, plain.result().num_examples)


def test_a_component_counts_for_those_who_have_it() -> None:
    low, high, sent = full(1, 1), full(3, 2), full(seed=9)
    combiner = LoraCombiner(FedAvg(shared="all"), CombineSettings(), sent, 3, ranks=[3, 1])
    combiner.add(Message(low, num_examples=3))
    combiner.add(Message(high, num_examples=1))
    combiner.add(Message(full(seed=3)))
    got = combiner.result().params
    torch.testing.assert_close(got[A][0], (3 * low[A][0] + high[A][0]) / 4)
    torch.testing.assert_close(got[B][:, 0], (3 * low[B][:, 0] + high[B][:, 0]) / 4)
    # Only the second client has components 1 and 2, and what it sends of them is their mean.
    assert torch.equal(got[A][1:3], high[A][1:3]) and torch.equal(got[B][:, 1:3], high[B][:, 1:3])
    # Nobody who counts has the last: it stays as it was sent out.
    assert torch.equal(got[A][3], sent[A][3]) and torch.equal(got[B][:, 3], sent[B][:, 3])
    torch.testing.assert_close(got[GATE], (3 * low[GATE] + high[GATE]) / 4)
    assert equal(combiner.result().params, got)


def test_the_mean_product_is_handed_on_to_who_asks_for_it() -> None:
    combine, one, other, sent = CombineSettings(weights="uniform"), full(1, 1), full(3, 2), full()
    combiner = LoraCombiner(FlexLora(shared="all"), combine, sent, 2, ranks=[1, 3])
    combiner.add(Message(one, num_examples=3))
    combiner.add(Message(other, num_examples=1))
    extra = combiner.result().extra
    first = (one[B] @ one[A] + other[B][:, :1] @ other[A][:1]) / 2
    alone = other[B][:, 1:] @ other[A][1:] + sent[B][:, 3:] @ sent[A][3:]
    torch.testing.assert_close(extra[B] @ extra[A], first + alone)
