"""One suite of laws over every algorithm; an algorithm's traits say which laws are its own."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import GATE, WRITE, Bench, Regression, own_settings, plain_training, start_params

from fednl.federation import record
from fednl.federation.algorithms import ALGORITHMS
from fednl.federation.algorithms.fedadam import FedAdam, FedAdamSettings
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.algorithms.fedavgm import FedAvgM, FedAvgMSettings
from fednl.federation.algorithms.fedyogi import FedYogi, FedYogiSettings
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, equal, personal
from fednl.federation.settings import TrainingSettings
from fednl.federation.transport import InProcessTransport, Reply

KINDS = sorted(ALGORITHMS)


def bench(path: Path, kind: str, **fields: Any) -> Bench:
    algorithm = ALGORITHMS[kind](own_settings(kind), "all")
    return Bench(path, algorithm=algorithm, lora=algorithm.traits.needs_lora, **fields)


@pytest.mark.parametrize("kind", [k for k in KINDS if ALGORITHMS[k].traits.one_client_is_local])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_client_equals_local_training_to_the_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    toy = bench(tmp_path / "r", kind, sizes={"cyd": 12}, dtype=dtype)
    transport = toy.transport()
    params = toy.run(transport)
    own = personal(params, transport.states()["cyd"])
    moved = toy.algorithm.trainable(start_params(lora=toy.lora))
    expected = plain_training(lambda round: Regression("cyd", 12, round, dtype=dtype), toy.training, moved)
    assert equal(own, expected)


@pytest.mark.parametrize("kind", [k for k in KINDS if ALGORITHMS[k].traits.order_free])
def test_neither_the_order_of_clients_nor_of_replies_changes_a_bit(kind: str, tmp_path: Path) -> None:
    # In float64, where no rounding to float32 hides a difference in the last bit.
    toy = bench(tmp_path / "a", kind, dtype=torch.float64)
    transport = toy.transport()
    params = toy.run(transport)
    turned = bench(tmp_path / "b", kind, dtype=torch.float64, sizes=dict(reversed(toy.sizes.items())))
    other = turned.transport(lambda replies: [replies[number] for number in (2, 0, 3, 1)])
    assert equal(turned.run(other), params)
    for client, state in transport.states().items():
        assert equal(other.states()[client], state)


@pytest.mark.parametrize("kind", KINDS)
def test_identical_replies_leave_the_rules_where_they_agree(kind: str) -> None:
    law = ALGORITHMS[kind].traits.identical_clients_unchanged and ALGORITHMS[kind].traits.shares
    agreed = {WRITE: torch.tensor([0.1, -0.2, 0.3]), GATE: torch.tensor(0.7)}
    new, _ = ALGORITHMS[kind](shared="all").server_step(start_params(), Message(agreed, num_examples=9), {})
    assert equal(new, agreed) or not law


@pytest.mark.parametrize("kind", KINDS)
def test_the_traits_say_whether_tensors_go_beside_the_rules(kind: str) -> None:
    algorithm = ALGORITHMS[kind](shared="all")
    beside = [*algorithm.extra(start_params()), *algorithm.given(["context.vectors"])]
    assert bool(beside) == algorithm.traits.sends_extra
    assert bool(algorithm.apart(algorithm.extra(start_params()))) == algorithm.traits.passes_on


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bits_and_another_does_not(kind: str, tmp_path: Path) -> None:
    def result(name: str, seed: int) -> tuple[Params, ClientState]:
        toy = bench(tmp_path / name, kind, seed=seed)
        toy.settings = toy.settings.model_copy(update={"clients_per_round": 2})
        transport = toy.transport()
        params = toy.run(transport)
        return params, {f"{c}/{n}": t for c, s in transport.states().items() for n, t in s.items()}

    first, second, other = result("a", 3), result("b", 3), result("c", 4)
    assert equal(first[0], second[0])
    assert equal(first[1], second[1])
    assert not equal(first[1], other[1])


@pytest.mark.parametrize("kind", KINDS)
def test_server_state_and_rules_stay_finite_and_new(kind: str) -> None:
    algorithm = ALGORITHMS[kind](shared="all")
    params = start_params()
    before = {name: tensor.clone() for name, tensor in params.items()}
    mean = Message({name: tensor + 1 for name, tensor in params.items()}, num_examples=2)
    state: ClientState = {}
    for _ in range(3):
        new, state = algorithm.server_step(params, mean, state)
        assert all(tensor.dtype == params[name].dtype for name, tensor in new.items())
        assert all(bool(torch.isfinite(tensor).all()) for tensor in [*new.values(), *state.values()])
    assert equal(params, before)


@pytest.mark.parametrize("kind", KINDS)
def test_c16_memory_stays_flat_over_fifty_rounds(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "fedavg":  # checkpoints are written the same way for all, and are most of the time
        monkeypatch.setattr(record, "save_round", lambda *rest: None)
    live: dict[int, int] = {}
    training = TrainingSettings(rounds=50, local_steps=1)
    toy = bench(tmp_path / "r", kind, training=training, sizes={"ada": 3})

    def count(event: Any) -> None:
        if event["event"] == "round-end" and event["round"] in (10, 50):
            gc.collect()
            live[event["round"]] = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    toy.run(InProcessTransport(toy.endpoint(), toy.sizes), on_event=count)
    assert live[50] <= live[10]
    kept = len(list((toy.path / "checkpoints").iterdir()))
    assert kept == (toy.settings.keep_checkpoints if kind == "fedavg" else 0)


# The settings at which an algorithm must be FedAvg to the bit, where it has such.
NEUTRAL: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavgm": {"server_lr": 1.0, "momentum": 0.0},
    "fedprox": {"mu": 0.0},
    "scaffold": {"correction": 0.0},
    "fedala": {"weight_lr": 0.0},
    "ewc": {"strength": 0.0},
    "fedssi": {"strength": 0.0},
    "fedweit": {"parts": (), "drift": 0.0, "unsent": 0.0},
    "reptile": {"outer_lr": 1.0},
    "per-fedavg": {"inner_lr": 0.0},
    "ifed-icl": {},  # the toys leave no context vectors
}


@pytest.mark.parametrize("task_rounds", [0, 1])
@pytest.mark.parametrize("kind", sorted(NEUTRAL))
@pytest.mark.parametrize("shared", ["all", "memory"])
def test_at_its_neutral_settings_an_algorithm_is_fedavg_to_the_bit(
    kind: str, shared: str, task_rounds: int, tmp_path: Path
) -> None:
    def result(name: str, algorithm: FedAvg) -> tuple[Params, Params]:
        toy = Bench(tmp_path / name, algorithm=algorithm, dtype=torch.float64, task_rounds=task_rounds)
        toy.settings = toy.settings.model_copy(update={"clients_per_round": 3})
        transport = toy.transport()
        params, states = toy.run(transport), transport.states()
        travels = algorithm.shared(params)
        own = {f"{c}/{n}": t for c, s in states.items() for n, t in personal(params, s).items() if n not in travels}
        return params, own

    plain = result("plain", FedAvg(shared=shared))
    other = result("other", ALGORITHMS[kind](ALGORITHMS[kind].Settings(**NEUTRAL[kind]), shared))
    assert equal(plain[0], other[0])
    assert equal(plain[1], other[1])


@pytest.mark.parametrize("shared", ["all", ("memory", "lora")])
def test_in_its_first_step_from_b_zero_ffa_lora_is_fedavg_to_the_bit_and_not_after(
    shared: str | tuple[str, ...], tmp_path: Path
) -> None:
    def result(kind: str, steps: int) -> Params:
        training = TrainingSettings(rounds=1, local_steps=steps)
        algorithm = ALGORITHMS[kind](shared=shared)
        return Bench(tmp_path / f"{kind}-{steps}", algorithm=algorithm, lora=True, training=training).run()

    assert equal(result("ffa-lora", 1), result("fedavg", 1))
    assert not equal(result("ffa-lora", 2), result("fedavg", 2))


def test_shared_only_moves_what_travels_and_all_clients_end_with_the_same_rules(tmp_path: Path) -> None:
    toy = Bench(tmp_path / "some", algorithm=ALGORITHMS["shared-only"](shared=["write"]))
    transport = toy.transport()
    params, start = toy.run(transport), start_params()
    assert {name for name in params if not torch.equal(params[name], start[name])} == {WRITE}
    owned = [personal(params, state) for state in transport.states().values()]
    assert all(equal(own, params) for own in owned) and len(owned) == len(toy.sizes)
    plain, whole = bench(tmp_path / "plain", "fedavg"), bench(tmp_path / "whole", "shared-only")
    assert equal(plain.run(), whole.run())


def test_local_only_sends_and_receives_nothing(tmp_path: Path) -> None:
    toy = bench(tmp_path / "r", "local-only")
    transport = toy.transport()
    params = toy.run(transport)
    assert equal(params, start_params())
    assert all(message.params == {} for message in transport.sent)
    assert all(Message.from_bytes(reply.payload).params == {} for reply in transport.returned)
    assert all(row["updated"] for row in toy.rows())
    for client, size in toy.sizes.items():
        own = personal(params, transport.states()[client])
        expected = plain_training(lambda round, c=client, n=size: Regression(c, n, round), toy.training, start_params())
        assert equal(own, expected)


def test_one_full_batch_sgd_like_round_equals_the_centralised_one() -> None:
    # The mean of N_k-weighted gradient steps is a step on the N-weighted loss.
    clients = [Regression("a", 3, dtype=torch.float64), Regression("b", 9, dtype=torch.float64)]
    start = {name: tensor.double() for name, tensor in start_params().items()}
    algorithm = FedAvg(shared="all")
    moved = []
    for problem in clients:
        grads = algorithm.gradient(start, problem.data(), Message(start), {}, problem)
        moved.append({name: start[name] - 0.1 * grads[name] for name in start})
    mean = {name: (3 * moved[0][name] + 9 * moved[1][name]) / 12 for name in start}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    x, y = (torch.cat(parts) for parts in zip(*(problem.data() for problem in clients), strict=True))
    clients[0].loss(leaves, (x, y)).backward()  # type: ignore[no-untyped-call]
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        torch.testing.assert_close(mean[name], start[name] - 0.1 * leaf.grad, rtol=0, atol=1e-14)


def test_fedavgm_without_momentum_at_rate_one_is_fedavg_to_the_bit(tmp_path: Path) -> None:
    plain = bench(tmp_path / "a", "fedavg")
    still = bench(tmp_path / "b", "fedavg")
    still.algorithm = FedAvgM(FedAvgMSettings(server_lr=1.0, momentum=0.0), "all")
    assert equal(plain.run(), still.run())
    # Also where params - (params - mean) would not give the mean back.
    far, mean = {"w": torch.tensor([1e30, 1e-30])}, {"w": torch.tensor([1e-30, 1e30])}
    assert equal(still.algorithm.server_step(far, Message(mean, num_examples=1), {})[0], mean)


def test_fedavgm_by_hand() -> None:
    algorithm = FedAvgM(FedAvgMSettings(server_lr=0.5, momentum=0.9), "all")
    params = {"w": torch.tensor([1.0], dtype=torch.float64)}
    new, state = algorithm.server_step(params, Message({"w": params["w"] - 0.2}, num_examples=1), {})
    assert new["w"].item() == pytest.approx(1.0 - 0.5 * 0.2, abs=1e-15)
    new, state = algorithm.server_step(new, Message({"w": new["w"] + 0.4}, num_examples=1), state)
    velocity = 0.9 * 0.2 - 0.4
    assert state["momentum/w"].item() == pytest.approx(velocity, abs=1e-15)
    assert new["w"].item() == pytest.approx(0.9 - 0.5 * velocity, abs=1e-15)


def test_fedadam_by_hand() -> None:
    algorithm = FedAdam(FedAdamSettings(server_lr=0.1, betas=(0.9, 0.99), tau=0.01), "all")
    params = {"w": torch.tensor([1.0], dtype=torch.float64)}
    new, state = algorithm.server_step(params, Message({"w": params["w"] + 0.2}, num_examples=1), {})
    first, second = 0.1 * 0.2, 0.99 * 0.01**2 + 0.01 * 0.2**2
    expected = 1.0 + 0.1 * first / (math.sqrt(second) + 0.01)
    assert new["w"].item() == pytest.approx(expected, abs=1e-15)
    new, state = algorithm.server_step(new, Message({"w": new["w"] - 0.3}, num_examples=1), state)
    first, second = 0.9 * first - 0.1 * 0.3, 0.99 * second + 0.01 * 0.3**2
    expected += 0.1 * first / (math.sqrt(second) + 0.01)
    assert new["w"].item() == pytest.approx(expected, abs=1e-15)
    assert state["first/w"].item() == pytest.approx(first, abs=1e-15)
    assert state["second/w"].item() == pytest.approx(second, abs=1e-15)


def test_fedyogi_by_hand_on_both_sides_of_its_sign() -> None:
    algorithm = FedYogi(FedYogiSettings(server_lr=0.1, betas=(0.9, 0.99), tau=0.01), "all")
    params = {"w": torch.tensor([1.0], dtype=torch.float64)}
    first, second, expected, state = 0.0, 0.01**2, 1.0, {}
    for change in (0.2, -0.001, 0.3):  # d^2 above v, then below, then above
        params, state = algorithm.server_step(params, Message({"w": params["w"] + change}, num_examples=1), state)
        first = 0.9 * first + 0.1 * change
        second -= 0.01 * change**2 * math.copysign(1, second - change**2)
        expected += 0.1 * first / (math.sqrt(second) + 0.01)
        assert params["w"].item() == pytest.approx(expected, abs=1e-12)
        assert state["second/w"].item() == pytest.approx(second, abs=1e-15)


def test_fedyogi_forgets_a_large_change_more_slowly_than_fedadam() -> None:
    def second(algorithm: FedAdam) -> float:
        params, state = {"w": torch.tensor([0.0])}, {}
        for change in [10.0] + 50 * [0.01]:
            mean = Message({"w": params["w"] + change}, num_examples=1)
            params, state = algorithm.server_step(params, mean, state)
        return float(state["second/w"])

    assert second(FedYogi(shared="all")) == pytest.approx(1.0, rel=1e-3)
    assert second(FedAdam(shared="all")) == pytest.approx(0.99**50, rel=1e-3)


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_with_a_large_tau_an_adaptive_server_is_a_damped_fedavg(kind: type[FedAdam]) -> None:
    # Without decay of the first moment and with tau far above any change, the step is a part of the change.
    algorithm = kind(kind.Settings(server_lr=1e6, betas=(0.0, 0.99), tau=1e6), "all")
    mean = {"w": torch.tensor([1.5])}
    new, state = algorithm.server_step({"w": torch.tensor([1.0])}, Message(mean, num_examples=1), {})
    # v starts at tau^2, so its root adds about 1 to the denominator's own 1, in units of tau.
    assert new["w"].item() == pytest.approx(1.0 + 0.5 / (1 + math.sqrt(float(state["second/w"])) / 1e6), abs=1e-6)


def test_an_algorithm_takes_its_own_settings_only() -> None:
    with pytest.raises(TypeError, match="FedAvgMSettings"):
        FedAvgM(FedAdamSettings())


def test_replies_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Reply("a").client = "b"  # type: ignore[misc]
