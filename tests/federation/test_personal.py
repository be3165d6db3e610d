"""Algorithms for clients that differ: FFA-LoRA, FedALA, Reptile, Per-FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import PROJECTION, WRITE, Bench, Bowl, Regression, rounds_of_descent, start_params
from pydantic import ValidationError

from fednl.federation.algorithms.fedala import FedAla, FedAlaSettings, mixture
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.algorithms.fedavgm import FedAvgM, FedAvgMSettings
from fednl.federation.algorithms.ffa_lora import FfaLora
from fednl.federation.algorithms.per_fedavg import PerFedAvg, PerFedAvgSettings
from fednl.federation.algorithms.reptile import Reptile, ReptileSettings
from fednl.federation.local import LocalPlan, train_locally
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, equal, personal, weighted_mean
from fednl.seeding import torch_rng

A, B, GATE = "layers.0.q_proj.lora_A", "layers.0.q_proj.lora_B", "layers.0.memory.gate.bias"
PLAN = LocalPlan(round=1, steps=4, lr=0.05)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch_rng(seed, "draw"), dtype=torch.float64)


@dataclass(frozen=True)
class LowRank(Bowl):
    """A client whose optimum is a product of its own: |B A + gate - target|^2."""

    def loss(self, params: Params, batch: Any = None) -> torch.Tensor:
        return (params[B] @ params[A] + params[GATE] - self.centre).square().sum()


def lora_start() -> Params:
    return {A: draw(2, 8), B: torch.zeros(8, 2, dtype=torch.float64), GATE: torch.zeros((), dtype=torch.float64)}


def lora_round(algorithm: FedAvg, params: Params, states: dict[str, ClientState]) -> list[Message]:
    received = {name: params[name] for name in algorithm.shared(params)}
    replies = []
    for number, client in enumerate(sorted(states)):
        problem = LowRank(draw(8, 8, seed=number + 1), num_examples=number + 1)
        reply, states[client] = train_locally(algorithm, problem, Message(received), states[client], PLAN)
        replies.append(reply)
    return replies


def test_b04_ffa_lora_averages_the_products_exactly_and_averaging_both_factors_does_not() -> None:
    def error(algorithm: FedAvg) -> float:
        params = lora_start()
        kept = {f"private/{A}": params[A]} if A not in algorithm.shared(params) else {}
        states: dict[str, ClientState] = {client: dict(kept) for client in ("a", "b", "c")}
        for _ in range(3):
            replies = lora_round(algorithm, params, states)
            own = [({**params, **reply.params}, float(reply.num_examples)) for reply in replies]
            params = weighted_mean(own)
        products = weighted_mean(({"w": p[B] @ p[A]}, weight) for p, weight in own)["w"]
        return float((params[B] @ params[A] - products).abs().max())

    assert error(FfaLora(shared="all")) < 1e-15
    assert error(FedAvg(shared="all")) > 1e-3


@pytest.mark.parametrize("shared", ["all", "lora"])
def test_ffa_loras_a_never_moves_and_never_travels(shared: str) -> None:
    algorithm, params = FfaLora(shared=shared), lora_start()
    travels = algorithm.shared(params)
    assert A not in travels
    assert B in travels
    private = {f"private/{name}": tensor for name, tensor in params.items() if name not in travels}
    states: dict[str, ClientState] = {client: dict(private) for client in ("a", "b")}
    for _ in range(3):
        replies = lora_round(algorithm, params, states)
        params = {**params, **replies[0].params}
        for reply, state in zip(replies, states.values(), strict=True):
            assert set(reply.params) == set(travels)
            assert not torch.equal(reply.params[B], lora_start()[B])
            assert torch.equal(state[f"private/{A}"], lora_start()[A])
            assert not [name for name in state if name.startswith("optimizer/") and name.endswith(A)]
    assert torch.equal(params[A], lora_start()[A])


def test_a_mixture_is_what_its_weights_say_and_stays_between() -> None:
    old, sent = {"w": draw(500)}, {"w": draw(500, seed=1) * 1e3}
    assert equal(mixture(old, sent, {"w": old["w"] * 0}), old)
    assert equal(mixture(old, sent, {"w": old["w"] * 0 + 1}), sent)
    for dtype in (torch.float32, torch.float64):
        low, high = old["w"].to(dtype), sent["w"].to(dtype)
        weights = torch.rand(500, generator=torch_rng(0, "weights"), dtype=dtype)
        mixed = mixture({"w": low}, {"w": high}, {"w": weights})["w"]
        assert bool(((mixed >= torch.minimum(low, high)) & (mixed <= torch.maximum(low, high))).all())
        torch.testing.assert_close(mixed, low + (high - low) * weights)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ala(**fields: Any) -> FedAla:
    return FedAla(FedAlaSettings(**fields), "all")


def test_fedala_by_hand() -> None:
    # Two elements that want the server's value less, one that wants more of it than there is: W stays at most 1.
    own, sent, bowl = numbers(0.0, 1.0, 0.0), numbers(1.0, -1.0, 1.0), Bowl(numbers(0.5, 0.5, 3.0), 2.0)
    state = {"private/w": own}
    params, after = ala(weight_lr=0.1, steps=1, most_passes=2).start(Message({"w": sent}), state, bowl)
    weights = numbers(1.0, 1.0, 1.0)
    for _ in range(2):
        at = own + (sent - own) * weights
        weights = (weights - 0.1 * 2.0 * (at - bowl.centre) * (sent - own)).clamp(0, 1)
    torch.testing.assert_close(after["mix/w"], weights, rtol=0, atol=1e-15)
    torch.testing.assert_close(params["w"], own + (sent - own) * weights, rtol=0, atol=1e-15)
    assert weights[2] == 1
    assert bool((weights[:2] < 1).all())


def test_fedala_ends_at_the_best_mixture_inside_the_box() -> None:
    own, sent, bowl = numbers(0.0, 0.0, 0.0), numbers(1.0, 1.0, -2.0), Bowl(numbers(0.25, -5.0, -7.0))
    algorithm = ala(weight_lr=0.2, threshold=0.0, most_passes=300, steps=1)
    params, after = algorithm.start(Message({"w": sent}), {"private/w": own}, bowl)
    torch.testing.assert_close(params["w"], numbers(0.25, 0.0, -2.0), rtol=0, atol=1e-12)
    torch.testing.assert_close(after["mix/w"], numbers(0.25, 0.0, 1.0), rtol=0, atol=1e-12)


def test_fedala_learns_once_in_full_then_one_pass_a_round() -> None:
    looks = []

    @dataclass(frozen=True)
    class Counted(Bowl):
        def loss(self, params: Params, batch: Any = None) -> torch.Tensor:
            looks.append(1)
            return super().loss(params, batch)

    bowl, received = Counted(numbers(9.0)), Message({"w": numbers(1.0)})
    algorithm = ala(weight_lr=0.1, steps=3, most_passes=7, threshold=0.0)
    _, state = algorithm.start(received, {}, bowl)  # a first round has nothing to mix
    assert not looks
    _, state = algorithm.start(received, {"private/w": numbers(1.0)}, bowl)  # nor has one where both are equal
    assert not looks
    _, state = algorithm.start(received, {"private/w": numbers(0.0)}, bowl)
    assert len(looks) == 7 * 3
    algorithm.start(received, state, bowl)
    assert len(looks) == 7 * 3 + 3
    looks.clear()
    ala(weight_lr=0.1, steps=3, most_passes=50, threshold=1e9).start(received, {"private/w": numbers(0.0)}, bowl)
    assert len(looks) == 10 * 3  # ten losses are needed to tell that they have settled


def test_fedala_does_not_raise_the_loss_it_starts_from() -> None:
    client = Regression("ada", 12, batch=12, dtype=torch.float64)
    own, sent = start_params(torch.float64), {name: t + 0.3 for name, t in start_params(torch.float64).items()}
    state = {f"private/{name}": tensor for name, tensor in own.items()}
    params, after = ala(weight_lr=0.05).start(Message(sent), state, client)
    assert client.loss(params, client.data()) < client.loss(sent, client.data())
    assert all(bool(((w >= 0) & (w <= 1)).all()) for name, w in after.items() if name.startswith("mix/"))


def test_fedalas_clients_keep_their_own_rules_and_the_loss_reported_is_that_of_the_steps(tmp_path: Path) -> None:
    toy = Bench(tmp_path / "r", algorithm=FedAla(shared="memory"))
    transport = toy.transport()
    params = toy.run(transport)
    last = {reply.client: Message.from_bytes(reply.payload) for reply in transport.returned}
    for client, state in transport.states().items():
        own = personal(params, state)
        assert torch.equal(own[WRITE], last[client].params[WRITE])
        assert not torch.equal(own[WRITE], params[WRITE])
        assert PROJECTION not in last[client].params
        assert [name for name in state if name.startswith("mix/")]
    client = Regression("ada", 5, 3)
    start, _ = toy.algorithm.start(Message(dict(last["ada"].params)), transport.states()["ada"], client)
    reply, _ = train_locally(
        toy.algorithm, client, Message(dict(last["ada"].params)), transport.states()["ada"], LocalPlan(3, 1, 0.1)
    )
    assert reply.metrics["loss_first"] == pytest.approx(float(client.loss(start, next(client.batches("train", 1)))))


@pytest.mark.parametrize("fields", [{"weight-lr": -1.0}, {"steps": 0}, {"most-passes": 0}, {"threshold": -0.1}])
def test_fedala_refuses(fields: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        FedAlaSettings.model_validate(fields)


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_reptile_goes_a_part_of_the_way(side: float) -> None:
    params, mean = {"w": numbers(1.0)}, Message({"w": numbers(1.0 + side * 0.5)}, num_examples=1)
    new, state = Reptile(ReptileSettings(outer_lr=0.25), "all").server_step(params, mean, {})
    assert float(new["w"]) == 1.0 + side * 0.125
    assert state == {}
    far, close = {"w": torch.tensor([1e30, 1e-30])}, {"w": torch.tensor([1e-30, 1e30])}
    whole = Reptile(ReptileSettings(outer_lr=1.0), "all").server_step(far, Message(close, num_examples=1), {})[0]
    assert equal(whole, close)


def test_reptile_is_fedavgm_without_momentum(tmp_path: Path) -> None:
    other = FedAvgM(FedAvgMSettings(server_lr=0.3, momentum=0.0), "all")
    first = Bench(tmp_path / "a", algorithm=Reptile(ReptileSettings(outer_lr=0.3), "all"), dtype=torch.float64).run()
    second = Bench(tmp_path / "b", algorithm=other, dtype=torch.float64).run()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=1e-15)


@pytest.mark.parametrize("away", [2.0, -2.0])
def test_per_fedavgs_gradient_is_the_one_after_a_step(away: float) -> None:
    algorithm = PerFedAvg(PerFedAvgSettings(inner_lr=0.2), "all")
    bowl = Bowl(numbers(1.0), 1.5)
    params, state = algorithm.start(Message({"w": numbers(1.0 + away)}), {}, bowl)
    grads = algorithm.gradient(params, None, Message(params), state, bowl)
    assert float(grads["w"]) == pytest.approx(1.5 * (1 - 0.2 * 1.5) * away, abs=1e-15)
    assert float(params["w"]) == 1.0 + away


def test_per_fedavg_seeks_where_one_step_is_good_not_where_the_loss_is_low() -> None:
    # A sharp client gets far with one step and needs the start less: it counts a (1 - inner_lr a) in place of a.
    sharp, wide = Bowl(numbers(-1.0), 4.0), Bowl(numbers(1.0), 1.0)
    algorithm = PerFedAvg(PerFedAvgSettings(inner_lr=0.2), "all")
    params, _, states = rounds_of_descent(algorithm, {"a": sharp, "b": wide}, {"w": numbers(0.3)}, 400, 0.1, 1)
    sharpness, width = 4.0 * (1 - 0.2 * 4.0), 1.0 * (1 - 0.2 * 1.0)
    expected = (sharpness * -1.0 + width * 1.0) / (sharpness + width)
    assert float(params["w"]) == pytest.approx(expected, abs=1e-10)
    assert states == {"a": {}, "b": {}}


def test_per_fedavg_takes_another_inner_batch_at_every_step() -> None:
    purposes = []

    @dataclass(frozen=True)
    class Noted(Bowl):
        def batches(self, purpose: str, steps: int, size: int = 0) -> Any:
            purposes.append((purpose, steps))
            return super().batches(purpose, steps, size)

    algorithm = PerFedAvg(shared="all")
    _, state = train_locally(algorithm, Noted(numbers(1.0)), Message({"w": numbers(0.0)}), {}, PLAN)
    assert purposes == [("train", 4), *((f"inner {step}", 1) for step in range(4))]
    assert [name for name in state if not name.startswith("optimizer/")] == []
