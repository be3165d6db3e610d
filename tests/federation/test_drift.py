"""Algorithms against client drift, FedProx and SCAFFOLD, by their closed forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federation_toys import WRITE, Bench, Bowl, descend, forge, rounds_of_descent, start_params
from pydantic import ValidationError

from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.algorithms.fedprox import FedProx, FedProxSettings
from fednl.federation.algorithms.scaffold import Scaffold, ScaffoldSettings
from fednl.federation.checkpoint import load_newest, save_round
from fednl.federation.combine import Mean
from fednl.federation.exchange import CombineSettings
from fednl.federation.message import Message
from fednl.federation.params import equal, finite, norm, subtract
from fednl.federation.settings import TrainingSettings
from fednl.federation.transport import Reply


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Two clients that pull to opposite sides, the one more sharply: here averaging settles at the wrong place.
BOWLS = {"left": Bowl(numbers(-1.0, 2.0), 4.0, 3), "right": Bowl(numbers(3.0, -5.0), 1.0, 1)}
OPTIMUM = (3 * 4.0 * BOWLS["left"].centre + 1 * 1.0 * BOWLS["right"].centre) / (3 * 4.0 + 1 * 1.0)


def prox(mu: float) -> FedProx:
    return FedProx(FedProxSettings(mu=mu), "all")


@pytest.mark.parametrize(("mu", "lr"), [(0.5, 0.5), (2.0, 0.5), (3.0, 0.5), (5.0, 0.5)])
def test_fedprox_without_data_multiplies_the_distance_by_one_minus_lr_mu(mu: float, lr: float) -> None:
    sent, away = numbers(1.0, 1.0), numbers(0.25, -0.25)  # drift to both sides
    flat = Bowl(sent, 0.0)
    grads = prox(mu).gradient({"w": sent + away}, None, Message({"w": sent}), {}, flat)
    assert torch.equal(grads["w"], mu * away)
    torch.testing.assert_close(away - lr * grads["w"], (1 - lr * mu) * away, rtol=0, atol=1e-15)
    if lr * mu == 1:
        assert torch.equal(sent + away - lr * grads["w"], sent)
    assert (norm({"w": away - lr * grads["w"]}) > norm({"w": away})) == (lr * mu > 2)


def test_fedprox_settles_between_what_was_sent_and_the_clients_optimum() -> None:
    sent = {"w": numbers(0.5, 0.5)}
    bowl = Bowl(numbers(2.0, -3.0), 1.5)
    reply, _ = descend(prox(0.5), bowl, Message(sent), {}, 0.2, 400)
    expected = (1.5 * bowl.centre + 0.5 * sent["w"]) / (1.5 + 0.5)
    torch.testing.assert_close(reply.params["w"], expected, rtol=0, atol=1e-12)


def test_fedprox_pulls_shared_rules_only_and_reports_the_data_loss() -> None:
    params = {"shared": numbers(1.0), "own": numbers(1.0)}
    received = Message({"shared": numbers(0.0)})
    assert float(prox(0.5).penalty(params, received, {})) == 0.25
    assert prox(0.0).penalty(params, received, {}) == 0.0


def test_fedprox_keeps_clients_closer_together_than_fedavg(tmp_path: Path) -> None:
    training = TrainingSettings(rounds=1, local_steps=60, local_lr=0.03)

    def moved(name: str, algorithm: FedAvg) -> float:
        toy = Bench(tmp_path / name, algorithm=algorithm, training=training)
        transport = toy.transport()
        toy.run(transport)
        return sum(norm(subtract(Message.from_bytes(r.payload).params, start_params())) for r in transport.returned)

    assert moved("prox", prox(10.0)) < 0.5 * moved("avg", FedAvg(shared="all"))


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_fedprox_refuses(mu: float) -> None:
    with pytest.raises(ValidationError):
        FedProxSettings(mu=mu)


def test_scaffold_finds_the_optimum_that_fedavg_misses() -> None:
    start = {"w": numbers(0.0, 0.0)}
    averaged, _, _ = rounds_of_descent(FedAvg(shared="all"), BOWLS, start, 300, 0.1, 8)
    params, server, states = rounds_of_descent(Scaffold(shared="all"), BOWLS, start, 300, 0.1, 8)
    # FedAvg's fixed point: each client goes the part 1 - (1 - lr a)^steps of its way.
    ways = {client: bowl.num_examples * (1 - (1 - 0.1 * bowl.curvature) ** 8) for client, bowl in BOWLS.items()}
    biased = sum(way * BOWLS[client].centre for client, way in ways.items()) / sum(ways.values())
    torch.testing.assert_close(averaged["w"], biased, rtol=0, atol=1e-10)
    assert norm({"w": averaged["w"] - OPTIMUM}) > 0.3
    torch.testing.assert_close(params["w"], OPTIMUM, rtol=0, atol=1e-8)
    # There every c_k is the client's own gradient, and c their mean, zero.
    torch.testing.assert_close(server["control/w"], numbers(0.0, 0.0), rtol=0, atol=1e-8)
    for client, bowl in BOWLS.items():
        own = bowl.curvature * (OPTIMUM - bowl.centre)
        torch.testing.assert_close(states[client]["pending/w"], own, rtol=0, atol=1e-7)


@pytest.mark.parametrize("lost", [("left", 1), ("right", 1), ("left", 4), ("right", 7)])
def test_scaffold_finds_the_optimum_also_where_a_reply_was_lost_after_its_client_had_moved_on(
    lost: tuple[str, int],
) -> None:
    start = {"w": numbers(0.0, 0.0)}
    params, server, _ = rounds_of_descent(Scaffold(shared="all"), BOWLS, start, 150, 0.1, 8, [lost])
    torch.testing.assert_close(params["w"], OPTIMUM, rtol=0, atol=1e-6)
    assert int(server["examples"]) == 4
    torch.testing.assert_close(server["control/w"], numbers(0.0, 0.0), rtol=0, atol=1e-6)


def test_scaffold_by_hand() -> None:
    algorithm, sent = Scaffold(shared="all"), {"w": numbers(1.0, -1.0)}
    bowl = Bowl(numbers(0.0, 0.0), 2.0, 5)
    state = {"control/w": numbers(0.5, -0.25)}
    received = Message(sent, {"control/w": numbers(-1.0, 1.0)})
    reply, after = descend(algorithm, bowl, received, state, 0.1, 2)
    shift = numbers(-1.5, 1.25)
    first = sent["w"] - 0.1 * (2 * sent["w"] + shift)
    second = first - 0.1 * (2 * first + shift)
    torch.testing.assert_close(reply.params["w"], second, rtol=0, atol=1e-15)
    # Option II of the paper, with the gradient steps that it is written for.
    published = state["control/w"] - received.extra["control/w"] + (sent["w"] - second) / (2 * 0.1)
    torch.testing.assert_close(after["pending/w"], published, rtol=0, atol=1e-14)
    assert torch.equal(after["control/w"], state["control/w"])
    torch.testing.assert_close(reply.extra["control/w"], published - state["control/w"], rtol=0, atol=1e-14)
    assert float(reply.extra["held"]) == 1
    assert set(after) == {"control/w", "pending/w", "sent", "sent/weight"}


def test_scaffolds_c_is_the_weighted_mean_over_the_clients_heard_so_far() -> None:
    algorithm, params = Scaffold(shared="all"), {"w": numbers(0.0)}
    bowls = {"a": Bowl(numbers(1.0), 1.0, 2), "b": Bowl(numbers(-4.0), 2.0, 3), "c": Bowl(numbers(9.0), 0.5, 5)}
    states: dict[str, dict[str, torch.Tensor]] = {client: {} for client in bowls}
    server: dict[str, torch.Tensor] = {}
    heard: dict[str, torch.Tensor] = {}
    # The third round and the first of all miss their quorum: what clients sent then is not in c. In others one reply
    # is lost, as that of b in the fifth.
    rounds = [("a", ""), ("ab", "ab"), ("bc", ""), ("ac", "ac"), ("ab", "a"), ("b", "b"), ("abc", "bc"), ("ac", "ac")]
    counted: dict[str, int] = {}
    for round, (all_asked, counts) in enumerate(rounds, 1):
        replies = {}
        for client in all_asked:
            beside = algorithm.to_client(algorithm.broadcast(params, server), client, server, counted.get(client, 0))
            received = Message(params, beside, round=round)
            replies[client], states[client] = descend(algorithm, bowls[client], received, states[client], 0.1, 3)
        if not counts:
            continue
        asked = list(counts)
        replies = {client: replies[client] for client in asked}
        counted |= dict.fromkeys(asked, round)
        weights = {client: reply.num_examples for client, reply in replies.items()}
        total = sum(weights.values())
        extra = {
            name: sum(replies[client].extra[name] * weights[client] for client in asked) / total
            for name in ("control/w", "held")
        }
        combined = Message(replies[asked[0]].params, extra, num_examples=total, round=round)
        params, server = algorithm.server_step(params, combined, server)
        heard |= {client: states[client]["pending/w"] for client in asked}
        examples = sum(bowls[client].num_examples for client in heard)
        mean = sum(control * bowls[client].num_examples for client, control in heard.items()) / examples
        torch.testing.assert_close(server["control/w"], mean, rtol=0, atol=1e-14)
        assert int(server["examples"]) == examples


@pytest.mark.parametrize("weights", ["examples", "uniform"])
@pytest.mark.parametrize("sizes", [(1, 100), (100, 1), (4, 4)])
def test_scaffold_follows_numbers_of_examples_that_change_with_the_task(sizes: tuple[int, int], weights: str) -> None:
    combine = CombineSettings(weights=weights, max_examples=250)
    algorithm, params = Scaffold(shared="all", weigh=combine.counted), {"w": numbers(0.0, 0.0)}
    server: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, torch.Tensor]] = {"left": {}, "right": {}}
    for round in range(1, 161):
        n = sizes[round > 6]
        bowls = {"left": Bowl(numbers(-1.0, 2.0), 4.0, 3 * n), "right": Bowl(numbers(3.0, -5.0), 1.0, n)}
        beside = algorithm.to_client(algorithm.broadcast(params, server), "any", server, round - 1)
        received = Message(params, beside, round=round)
        mean = Mean(combine, params)
        for client, bowl in bowls.items():
            reply, states[client] = descend(algorithm, bowl, received, states[client], 0.1, 8)
            mean.add(reply)
        params, server = algorithm.server_step(params, replace(mean.result(), round=round), server)
        counts = {client: combine.counted(bowl.num_examples) for client, bowl in bowls.items()}
        sent = sum(counts[client] * states[client]["pending/w"] for client in bowls) / sum(counts.values())
        torch.testing.assert_close(server["control/w"], sent, rtol=0, atol=1e-9)
        assert int(server["examples"]) == sum(counts.values())
    pulls = {client: counts[client] * bowl.curvature for client, bowl in bowls.items()}
    optimum = sum(pulls[client] * bowl.centre for client, bowl in bowls.items()) / sum(pulls.values())
    torch.testing.assert_close(params["w"], optimum, rtol=0, atol=1e-6)


def test_scaffold_does_not_correct_a_client_that_is_new() -> None:
    received = Message({"w": numbers(1.0)}, {"control/w": numbers(7.0)})
    fresh, _ = descend(Scaffold(shared="all"), BOWLS["right"], received, {}, 0.1, 3)
    plain, _ = descend(FedAvg(shared="all"), BOWLS["right"], replace(received, extra={}), {}, 0.1, 3)
    assert equal(fresh.params, plain.params)
    assert float(fresh.extra["held"]) == 0


def test_scaffold_sends_twice_fedavgs_tensors_and_keeps_private_rules_private(tmp_path: Path) -> None:
    toy = Bench(tmp_path / "r", algorithm=Scaffold(shared="memory"), training=TrainingSettings(rounds=4, local_steps=1))
    transport = toy.transport()
    toy.run(transport)
    assert all(row["refused"] == {} and row["updated"] for row in toy.rows())
    names = set(Scaffold(shared="memory").shared(start_params()))
    for message in transport.sent:
        assert set(message.params) == names
        carried = {"held", *(f"control/{name}" for name in names)}
        assert set(message.extra) == (carried if message.round > 1 else {"held"})
    sizes = {message.tensor_bytes for message in transport.sent if message.round > 1}
    assert len(sizes) == 1, "a message grows with the rounds"
    for reply in transport.returned:
        sent = Message.from_bytes(reply.payload)
        assert set(sent.extra) == carried


def test_scaffold_corrections_change_the_second_round_only(tmp_path: Path) -> None:
    def after(name: str, correction: float, rounds: int) -> dict[str, torch.Tensor]:
        toy = Bench(tmp_path / name, algorithm=Scaffold(ScaffoldSettings(correction=correction), "all"))
        return toy.run(stop_after=rounds)

    assert equal(after("a", 1.0, 1), after("b", 0.0, 1))
    assert not equal(after("c", 1.0, 2), after("d", 0.0, 2))


def test_scaffold_goes_on_after_rounds_without_a_quorum(tmp_path: Path) -> None:
    # In the first rounds one client answers and two are wanted, so nothing of them is in c or in the rules.
    def lone(replies: list[Reply]) -> list[Reply]:
        return replies[:1] if Message.from_bytes(replies[0].payload).round <= 2 else replies

    toy = Bench(tmp_path / "r", algorithm=Scaffold(shared="all"), training=TrainingSettings(rounds=5))
    toy.settings = toy.settings.model_copy(update={"quorum": 2})
    transport = toy.transport(lone)
    params = toy.run(transport)
    assert [row["updated"] for row in toy.rows()] == [False, False, True, True, True]
    assert finite(params)
    server = load_newest(toy.path / "checkpoints").server_state  # type: ignore[union-attr]
    assert int(server["examples"]) == sum(toy.sizes.values())
    total = sum(toy.sizes[c] * s["pending/" + WRITE].double() for c, s in transport.states().items())
    mean = total / sum(toy.sizes.values())
    torch.testing.assert_close(server["control/" + WRITE].double(), mean, rtol=0, atol=1e-6)


def refused_in_round_two(replies: list[Reply]) -> list[Reply]:
    """The client has moved on by then, as its state is its own."""
    later = Message.from_bytes(replies[0].payload).round == 2
    return [forge(reply, params={}) if later and reply.client == "cyd" else reply for reply in replies]


def test_scaffolds_c_is_the_mean_of_what_clients_hold_after_a_reply_was_refused(tmp_path: Path) -> None:
    toy = Bench(tmp_path / "r", algorithm=Scaffold(shared="all"), training=TrainingSettings(rounds=4, local_steps=2))
    transport = toy.transport(refused_in_round_two)
    toy.run(transport)
    assert [row["refused"] for row in toy.rows()] == [{}, {"missing-name": 1}, {}, {}]
    newest = load_newest(toy.path / "checkpoints")
    assert newest is not None and newest.state["counted"] == dict.fromkeys(toy.sizes, 4)
    total = sum(toy.sizes[c] * s["pending/" + WRITE].double() for c, s in transport.states().items())
    mean = total / sum(toy.sizes.values())
    torch.testing.assert_close(newest.server_state["control/" + WRITE].double(), mean, rtol=0, atol=1e-6)
    told = {m.client: int(m.extra["held"]) for m in transport.sent if m.round == 3}
    assert told == {"ada": 2, "bob": 2, "cyd": 1, "dan": 2}


def test_scaffold_goes_on_from_checkpoints_that_do_not_say_who_counted_last(tmp_path: Path) -> None:
    """They hold the rounds that c is of; who was refused in them is in rounds.jsonl."""
    training = TrainingSettings(rounds=4, local_steps=2)
    whole, old = (Bench(tmp_path / name, algorithm=Scaffold(shared="all"), training=training) for name in ("a", "b"))
    expected = whole.run(whole.transport(refused_in_round_two))
    for after in (2, 3):
        old.run(old.transport(refused_in_round_two), stop_after=after)
        newest = load_newest(old.path / "checkpoints")
        assert newest is not None
        state = {name: value for name, value in newest.state.items() if name not in ("counted", "sound")}
        server = {**newest.server_state, "held": torch.arange(1, after + 1)}
        save_round(old.path / "checkpoints", after, newest.params, server, newest.client_states, state, 2)
    assert equal(old.run(), expected)
    last = load_newest(old.path / "checkpoints")
    assert last is not None and "held" not in last.server_state
