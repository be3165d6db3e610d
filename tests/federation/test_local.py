from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from federation_toys import GATE, PROJECTION, WRITE, Regression, plain_training, start_params

from fednl.errors import DataError, MessageError
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.local import LocalPlan, learning_rate, train_locally
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, copy, equal
from fednl.federation.settings import TrainingSettings

ALL = FedAvg(shared="all")
MEMORY = FedAvg(shared="memory")


def sent(algorithm: FedAvg = ALL, params: Params | None = None, round: int = 1) -> Message:
    params = params or start_params()
    shared = {name: params[name] for name in algorithm.shared(params)}
    return Message(shared, round=round, client="ada", run="r")


def private_start() -> ClientState:
    return {f"private/{PROJECTION}": start_params()[PROJECTION]}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"clip": 0.05},
        {"schedule": "cosine", "warmup_steps": 3},
        {"schedule": "cosine"},
        {"warmup_steps": 5},
    ],
)
def test_rounds_with_kept_optimizer_equal_one_plain_adamw_loop(keys: dict[str, Any]) -> None:
    training = TrainingSettings(rounds=3, local_steps=4, batch=4, **keys)
    params, state = start_params(), {}
    for round in range(1, training.rounds + 1):
        problem = Regression("ada", 6, round)
        plan = LocalPlan.of(training, round)
        message, state = train_locally(ALL, problem, sent(params=params, round=round), state, plan)
        params = message.params
    expected = plain_training(lambda round: Regression("ada", 6, round), training, start_params())
    assert equal(params, expected)
    assert state["optimizer/step"].item() == 12


def test_reset_starts_each_round_anew_and_keeps_nothing() -> None:
    training = TrainingSettings(rounds=2, local_steps=2, optimizer_state="reset")
    kept = replace(LocalPlan.of(training, 2), optimizer_state="keep")
    first, state = train_locally(ALL, Regression("ada", 6), sent(), {}, LocalPlan.of(training, 1))
    assert state == {}
    again = sent(params=first.params, round=2)
    _, moments = train_locally(ALL, Regression("ada", 6), sent(), {}, replace(kept, round=1))
    anew, _ = train_locally(ALL, Regression("ada", 6, 2), again, moments, LocalPlan.of(training, 2))
    fresh, _ = train_locally(ALL, Regression("ada", 6, 2), again, {}, kept)
    carried, _ = train_locally(ALL, Regression("ada", 6, 2), again, moments, kept)
    assert equal(anew.params, fresh.params)
    assert not equal(anew.params, carried.params)


def test_the_schedule_runs_over_the_whole_run() -> None:
    plan = LocalPlan(round=1, steps=5, lr=0.8, schedule="cosine", warmup_steps=4, total_steps=20)
    rates = [learning_rate(replace(plan, round=round), step) for round in range(1, 5) for step in range(5)]
    assert rates[:4] == [0.2, 0.4, pytest.approx(0.6), 0.8]
    assert rates[4] == 0.8
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[4:]))
    assert rates[12] == pytest.approx(0.4)
    assert 0 < rates[-1] < 0.01
    assert learning_rate(replace(plan, round=9), 4) == 0.0
    assert learning_rate(replace(plan, schedule="constant"), 4) == 0.8


def test_the_reply_says_what_was_measured() -> None:
    seen: list[dict[str, Any]] = []
    plan = LocalPlan(round=1, steps=3, lr=0.1)
    message, _ = train_locally(ALL, Regression("ada", 6), sent(), {}, plan, seen.append)
    assert (message.round, message.client, message.run, message.num_examples) == (1, "ada", "r", 6)
    assert [facts["step"] for facts in seen] == [1, 2, 3]
    losses = [facts["loss"] for facts in seen]
    batches = list(Regression("ada", 6).batches("train", 3))
    assert losses[0] == Regression("ada", 6).loss(start_params(), batches[0]).item()
    assert message.metrics["loss"] == sum(losses) / 3
    assert (message.metrics["loss_first"], message.metrics["loss_last"]) == (losses[0], losses[-1])
    assert message.metrics["steps"] == 3
    assert message.metrics["seconds_s"] > 0


def test_private_names_stay_out_of_the_message_and_survive_rounds() -> None:
    plan = LocalPlan(round=1, steps=2, lr=0.1)
    state = private_start()
    message, state = train_locally(MEMORY, Regression("ada", 6), sent(MEMORY), state, plan)
    assert set(message.params) == {WRITE, GATE}
    moved = state[f"private/{PROJECTION}"]
    assert not torch.equal(moved, start_params()[PROJECTION])
    frozen = replace(plan, round=2, lr=1e-12)
    again = Message(message.params, round=2, client="ada", run="r")
    _, later = train_locally(MEMORY, Regression("ada", 6, 2), again, state, frozen)
    torch.testing.assert_close(later[f"private/{PROJECTION}"], moved, rtol=0, atol=1e-6)


def test_inputs_are_not_modified() -> None:
    received, state = sent(MEMORY), private_start()
    before = copy(received.params), copy(state)
    plan = LocalPlan(round=1, steps=2, lr=0.1)
    _, second = train_locally(MEMORY, Regression("ada", 6), received, state, plan)
    kept = copy(second)
    train_locally(MEMORY, Regression("ada", 6), received, second, plan)
    assert equal(received.params, before[0])
    assert equal(state, before[1])
    assert equal(second, kept)


def test_a_client_without_examples_replies_with_what_it_received() -> None:
    state = private_start()
    plan = LocalPlan(round=1, steps=2, lr=0.1)
    message, after = train_locally(MEMORY, Regression("ada", 0), sent(MEMORY), state, plan)
    assert (message.num_examples, message.status, message.metrics) == (0, "empty", {})
    assert equal(message.params, sent(MEMORY).params)
    assert after is state


def test_a_client_with_fewer_examples_than_a_batch_still_takes_its_steps() -> None:
    plan = LocalPlan(round=1, steps=2, lr=0.1)
    message, _ = train_locally(ALL, Regression("bob", 1), sent(), {}, plan)
    assert message.metrics["steps"] == 2
    assert not equal(message.params, sent().params)


class NoBatches(Regression):
    def batches(self, purpose: str, steps: int, size: int = 0) -> Iterator[Any]:
        return iter(())


class Diverges(Regression):
    def loss(self, params: Params, batch: Any) -> torch.Tensor:
        return super().loss(params, batch) * float("nan")


def test_examples_without_a_batch_are_an_error() -> None:
    with pytest.raises(DataError, match='"ada" has 6 examples'):
        train_locally(ALL, NoBatches("ada", 6), sent(), {}, LocalPlan(round=1, steps=2, lr=0.1))


def test_a_diverged_round_sends_its_nan_and_leaves_the_state_as_it_was() -> None:
    plan = LocalPlan(round=1, steps=2, lr=0.1)
    _, state = train_locally(ALL, Regression("ada", 6), sent(), {}, plan)
    message, after = train_locally(ALL, Diverges("ada", 6), sent(), state, plan)
    assert bool(torch.isnan(message.params[WRITE]).any())
    assert after is state
    assert "loss" not in Message.from_bytes(message.to_bytes()).metrics


class Leaks(FedAvg):
    def finish(self, params: Params, received: Message, state: ClientState, problem: Any) -> Any:
        return Message(copy(params), num_examples=problem.num_examples), state


class LeaksExtra(FedAvg):
    def finish(self, params: Params, received: Message, state: ClientState, problem: Any) -> Any:
        message, state = super().finish(params, received, state, problem)
        return replace(message, extra={"memory-state": params[PROJECTION]}), state


@pytest.mark.parametrize("kind", [Leaks, LeaksExtra])
def test_an_algorithm_that_would_send_private_rules_is_stopped_at_the_client(kind: type[FedAvg]) -> None:
    plan = LocalPlan(round=1, steps=1, lr=0.1)
    with pytest.raises(MessageError, match="1 tensors that") as caught:
        train_locally(kind(shared="memory"), Regression("ada", 6), sent(MEMORY), private_start(), plan)
    assert caught.value.code == "unknown-name"


def test_a_server_cannot_overwrite_private_rules() -> None:
    with pytest.raises(MessageError) as caught:
        train_locally(MEMORY, Regression("ada", 6), sent(ALL), private_start(), LocalPlan(round=1, steps=1, lr=0.1))
    assert caught.value.code == "unknown-name"


class FixesGate(FedAvg):
    def trainable(self, names: Any) -> list[str]:
        return sorted(set(names) - {GATE})


class Notes(FedAvg):
    def after_step(self, before: Params, after: Params, grads: Params, state: ClientState) -> ClientState:
        path = state.get("path", torch.zeros(())) + (after[WRITE] - before[WRITE]).abs().sum()
        return {**state, "path": path, "last": after[WRITE], "gradient": grads[WRITE]}

    def penalty(self, params: Params, received: Message, state: ClientState) -> torch.Tensor:
        return 100.0 * (params[WRITE] - received.params[WRITE]).square().sum()


def test_what_is_not_trainable_does_not_move_and_still_travels() -> None:
    plan = LocalPlan(round=1, steps=3, lr=0.1)
    message, state = train_locally(FixesGate(shared="all"), Regression("ada", 6), sent(), {}, plan)
    assert torch.equal(message.params[GATE], start_params()[GATE])
    assert not torch.equal(message.params[WRITE], start_params()[WRITE])
    assert f"optimizer/exp_avg/{GATE}" not in state


def test_hooks_see_new_tensors_and_the_penalty_pulls_but_is_not_the_loss() -> None:
    plan = LocalPlan(round=1, steps=4, lr=0.1)
    noted, state = train_locally(Notes(shared="all"), Regression("ada", 6), sent(), {}, plan)
    free, _ = train_locally(ALL, Regression("ada", 6), sent(), {}, plan)
    assert torch.equal(state["last"], noted.params[WRITE])
    moved = (noted.params[WRITE] - start_params()[WRITE]).abs().sum()
    assert 0 < moved < (free.params[WRITE] - start_params()[WRITE]).abs().sum()
    assert state["path"] >= moved
    assert noted.metrics["loss_first"] == free.metrics["loss_first"]
    assert noted.metrics["loss_last"] > free.metrics["loss_last"]


def test_a_rule_that_no_batch_touches_keeps_its_value_and_has_moments() -> None:
    params = {**start_params(), "layers.9.memory.gate.bias": torch.ones(2)}
    message, state = train_locally(ALL, Regression("ada", 6), sent(params=params), {}, LocalPlan(1, 2, 0.1))
    assert torch.equal(message.params["layers.9.memory.gate.bias"], torch.ones(2))
    assert not state["optimizer/exp_avg/layers.9.memory.gate.bias"].any()
