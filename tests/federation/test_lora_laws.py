"""Laws of a round over clients of unlike LoRA ranks, for every algorithm that takes ranks.

Clients that return what they were sent change nothing, and who does not answer wipes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import LORA_A, LORA_B, Bench, forge, own_settings
from torch import Tensor

from fednl.federation.algorithms import ALGORITHMS
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.algorithms.fedavgm import FedAvgM, FedAvgMSettings
from fednl.federation.exchange import CombineSettings
from fednl.federation.lora_combine import LoraCombiner
from fednl.federation.lora_ranks import Ranks
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, equal
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.transport import Reply

A, B, GATE = "layers.0.q_proj.lora_A", "layers.0.q_proj.lora_B", "layers.0.memory.gate.bias"
RANK = 3
KINDS = sorted(kind for kind, own in ALGORITHMS.items() if own.traits.shares and not own.traits.sends_extra)
TURNED = [kind for kind in KINDS if ALGORITHMS[kind].traits.renews_factors]
KEPT = sorted(set(KINDS) - set(TURNED))
LOW = {"a": "1", "b": "1", "c": "1"}
ENTRIES = tuple(f"{client}={rank}" for client, rank in LOW.items())


def start(kind: str, seed: int = 0) -> Params:
    rng = torch.Generator().manual_seed(seed)
    shapes = {A: (RANK, 4), B: (5, RANK), GATE: (2,)}
    params = {name: torch.randn(shape, generator=rng, dtype=torch.float64) for name, shape in shapes.items()}
    if kind == "flora":  # its fresh components begin with B at zero
        params[B][:, own_settings(kind).merged_rank :] = 0
    return {name: params[name] for name in ALGORITHMS[kind](own_settings(kind), "all").shared(params)}


def product(params: Mapping[str, Tensor]) -> Tensor:
    return params[B].double() @ params[A].double()


@dataclass
class Server:
    """The server's part of a round as the loop does it: offers, combines what comes back, steps, measures."""

    algorithm: FedAvg
    params: Params
    weights: Mapping[str, int]
    entries: tuple[str, ...] = ENTRIES
    state: ClientState = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    combined: Message = field(default_factory=lambda: Message({}))

    def offered(self, client: str) -> Params:
        return self.algorithm.returns(self.algorithm.offer(self.params, Ranks(self.entries).of(client)))

    def take(self, replies: Mapping[str, Params]) -> Params:
        ranks = Ranks(self.entries).all
        combiner = LoraCombiner(self.algorithm, CombineSettings(), self.params, len(self.weights), ranks)
        for client, params in sorted(replies.items()):
            combiner.add(Message(params, num_examples=self.weights[client]))
        assert not combiner.fault()
        sent, self.combined = self.params, combiner.result()
        self.params, self.state = self.algorithm.server_step(sent, self.combined, self.state)
        self.metrics = self.algorithm.measure(sent, self.combined, self.params, combiner.products())
        return self.params


def server(kind: str, **fields: Any) -> Server:
    weights = {"a": 3, "b": 1, "c": 2, "d": 5}
    return Server(ALGORITHMS[kind](own_settings(kind), "all"), start(kind), weights, **fields)


def trained(params: Params, seed: int) -> Params:
    rng = torch.Generator().manual_seed(seed)
    return {name: t + torch.randn(t.shape, generator=rng, dtype=t.dtype) for name, t in params.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ["abcd", "abc", "a", "cd", "d"])
def test_clients_that_return_what_they_were_sent_leave_it(kind: str, asked: str) -> None:
    own = server(kind)
    before = own.params
    for _ in range(3):
        own.take({client: own.offered(client) for client in asked})
    if kind in TURNED:
        torch.testing.assert_close(product(own.params), product(before), rtol=0, atol=1e-12)
    else:
        assert equal(own.params, before)
    assert own.metrics.get("lora_error", 0.0) < 1e-12


@pytest.mark.parametrize("kind", KEPT)
def test_a_round_without_the_client_of_the_highest_rank_leaves_its_components(kind: str) -> None:
    own = server(kind)
    before = own.params
    own.take({client: trained(own.offered(client), ord(client)) for client in "abc"})
    assert torch.equal(own.params[B][:, 1:], before[B][:, 1:])
    assert not torch.equal(own.params[B][:, :1], before[B][:, :1])
    assert A not in before or torch.equal(own.params[A][1:], before[A][1:])


def test_flexlora_without_the_client_of_the_highest_rank_keeps_what_it_made() -> None:
    own = server("flexlora")
    before, replies = own.params, {client: trained(own.offered(client), ord(client)) for client in "abc"}
    own.take(replies)
    low = sum(own.weights[client] * product(replies[client]) for client in replies) / 6
    exact = low + before[B][:, 1:] @ before[A][1:]
    torch.testing.assert_close(product(own.combined.extra), exact, rtol=0, atol=1e-12)
    u, s, vh = torch.linalg.svd(exact)
    best = u[:, :RANK] * s[:RANK] @ vh[:RANK]
    torch.testing.assert_close(product(own.params), best, rtol=0, atol=1e-12)
    missed = float(torch.linalg.norm(exact - best) / torch.linalg.norm(exact))
    assert own.metrics["lora_error"] == pytest.approx(missed, rel=1e-9)


@pytest.mark.parametrize("asked", ["abc", "abcd"])
def test_flora_adds_the_mean_change_and_takes_nothing_away(asked: str) -> None:
    own = server("flora")
    before, replies = own.params, {client: trained(own.offered(client), ord(client)) for client in asked}
    assert {len(reply[A]) for reply in replies.values()} == ({1, 2} if "d" in asked else {1})
    total = sum(own.weights[client] for client in replies)
    change = sum(own.weights[client] * product(replies[client]) for client in replies) / total
    own.take(replies)
    torch.testing.assert_close(product(own.combined.extra), change, rtol=0, atol=1e-12)
    exact = product(before) + change
    missed = float(torch.linalg.norm(exact - product(own.params)) / torch.linalg.norm(exact))
    assert own.metrics["lora_error"] == pytest.approx(missed, rel=1e-9)


@pytest.mark.parametrize("kind", ["fedavg", "flexlora"])
def test_each_component_is_the_mean_over_those_who_have_it(kind: str) -> None:
    own = server(kind, entries=("a=1", "b=2", "c=1"))
    before, replies = own.params, {client: trained(own.offered(client), ord(client)) for client in "abcd"}
    own.take(replies)
    exact = torch.zeros_like(product(before))
    for component, holders in enumerate(("abcd", "bd", "d")):
        share = {client: own.weights[client] / sum(own.weights[one] for one in holders) for client in holders}
        b, a = (
            sum(share[c] * replies[c][name].select(axis, component) for c in holders) for name, axis in ((B, 1), (A, 0))
        )
        torch.testing.assert_close(own.combined.params[B][:, component], b, rtol=0, atol=1e-14)
        torch.testing.assert_close(own.combined.params[A][component], a, rtol=0, atol=1e-14)
        exact += sum(share[c] * torch.outer(replies[c][B][:, component], replies[c][A][component]) for c in holders)
    missed = float(torch.linalg.norm(exact - product(own.params)) / torch.linalg.norm(exact))
    assert missed > 1e-3
    assert own.metrics["lora_error"] == pytest.approx(missed, rel=1e-9)
    moved = float(torch.linalg.norm(exact - product(before)))
    assert own.metrics["lora_error_of_update"] == pytest.approx(
        missed * float(torch.linalg.norm(exact)) / moved, rel=1e-9
    )


def test_a_component_that_nobody_trained_moves_by_the_servers_momentum_alone() -> None:
    own = replace(server("fedavg"), algorithm=FedAvgM(FedAvgMSettings(momentum=0.5), "all"))
    first = own.params
    second = own.take({"d": trained(own.offered("d"), 1)})
    third = own.take({client: trained(own.offered(client), ord(client)) for client in "abc"})
    torch.testing.assert_close(third[B][:, 1:] - second[B][:, 1:], 0.5 * (second[B][:, 1:] - first[B][:, 1:]))


RUN = TrainingSettings(rounds=3, local_steps=3, batch=4, local_lr=0.1, optimizer_state="reset")


def toy(path: Path, kind: str, ranks: tuple[str, ...], **settings: Any) -> Bench:
    algorithm = ALGORITHMS[kind](own_settings(kind), "all")
    federation = FederationSettings(lora_ranks=ranks, **settings)
    return Bench(path, algorithm=algorithm, settings=federation, training=RUN, lora=True, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["fedala", "fedavg", "ffa-lora", "flexlora"])
@pytest.mark.parametrize("asked", [0, 2])
def test_a_whole_run_stands_still_where_clients_only_send_back(tmp_path: Path, kind: str, asked: int) -> None:
    own = toy(tmp_path, kind, ("ada=1", "cyd=1"), clients_per_round=asked)
    # Every client's component is at work before the others begin to send back.
    learned = own.run(stop_after=1)

    def send_back(replies: list[Reply]) -> list[Reply]:
        sent = {(message.client, message.round): message.params for message in transport.sent}
        read = [Message.from_bytes(reply.payload) for reply in replies]
        return [forge(r, params=sent[m.client, m.round]) for r, m in zip(replies, read, strict=True)]

    transport = own.transport(send_back)
    params = own.run(transport)
    assert learned[LORA_B].any() and all(row["updated"] for row in own.rows())
    if kind in TURNED:
        torch.testing.assert_close(
            params[LORA_B] @ params[LORA_A], learned[LORA_B] @ learned[LORA_A], rtol=0, atol=1e-12
        )
    else:
        assert equal(params, learned)


def test_a_client_that_fails_every_round_keeps_its_components(tmp_path: Path) -> None:
    own = toy(tmp_path, "fedavg", ("ada=1", "bob=1", "cyd=1"))
    learned = own.run(stop_after=1)
    params = own.run(own.transport(lambda replies: [reply for reply in replies if reply.client != "dan"]))
    assert learned[LORA_B][:, 1].any()
    assert torch.equal(params[LORA_B][:, 1], learned[LORA_B][:, 1])
    assert torch.equal(params[LORA_A][1], learned[LORA_A][1])
    assert not torch.equal(params[LORA_B][:, 0], learned[LORA_B][:, 0])
