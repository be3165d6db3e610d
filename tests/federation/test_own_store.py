"""A client with its own disk trains once a round, whatever the server asks again."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from federation_toys import PROJECTION, SIZES, Bench, start_params

from fednl.errors import CheckpointError
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.exchange import Exchange, PrivacySettings
from fednl.federation.message import Message
from fednl.federation.own_store import OwnStore
from fednl.federation.params import equal
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.transport import InProcessTransport

TRAINING = TrainingSettings(rounds=5, local_steps=2)


class Counted:
    """An endpoint that counts how often each client trained in each round."""

    def __init__(self, toy: Bench) -> None:
        self.inner, self.done = toy.endpoint(), list[tuple[str, int]]()

    def __call__(self, client: str, message: Message, *rest: Any) -> Any:
        self.done.append((client, message.round))
        return self.inner(client, message, *rest)


class OnItsOwn(InProcessTransport):
    """Clients across a network: this process holds none of their states."""

    def states(self) -> dict[str, Any]:
        return {}

    def restore(self, states: Any) -> None:
        pass


def bench(path: Path) -> Bench:
    algorithm = FedAvg(shared="memory")
    return Bench(path, algorithm=algorithm, training=TRAINING, settings=FederationSettings(keep_checkpoints=3))


def store_of(toy: Bench, folder: Path) -> tuple[OwnStore, Counted]:
    endpoint = Counted(toy)
    return OwnStore(endpoint, folder, {f"private/{PROJECTION}": start_params()[PROJECTION]}), endpoint


def test_clients_that_keep_their_own_state_give_the_same_rules_and_a_second_question_no_second_training(
    tmp_path: Path,
) -> None:
    plain, toy = bench(tmp_path / "plain"), bench(tmp_path / "own" / "run")
    plain.path.mkdir(parents=True)
    expected = plain.run()
    store, endpoint = store_of(toy, tmp_path / "disk")
    assert equal(toy.run(OnItsOwn(store, SIZES)), expected)
    assert sorted(endpoint.done) == sorted((client, round) for client in SIZES for round in range(1, 6))
    file = next((tmp_path / "disk").rglob("round-5.safetensors"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_c24_a_server_that_goes_back_gets_the_same_bytes_from_clients_that_trained_once(tmp_path: Path) -> None:
    """Server and clients are killed and come back, the server with its checkpoints, the clients with their disks."""
    whole = bench(tmp_path / "whole").run()
    toy = bench(tmp_path / "run")

    def kill(event: Any) -> None:
        if event["event"] == "client-done" and (event["round"], event["client"]) == (4, "cyd"):
            raise RuntimeError("killed")

    store, first = store_of(toy, tmp_path / "disk")
    with pytest.raises(RuntimeError, match="killed"):
        toy.run(OnItsOwn(store, SIZES), on_event=kill)
    assert first.done.count(("ada", 4)) == 1
    store, second = store_of(toy, tmp_path / "disk")
    assert equal(toy.run(OnItsOwn(store, SIZES)), whole)
    assert [client for client, round in second.done if round == 4] == ["dan"]


def test_another_question_in_an_earlier_round_is_trained_from_the_state_before_it(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run")
    store, endpoint = store_of(toy, tmp_path / "disk")
    asked: dict[int, Message] = {}
    params = {name: tensor for name, tensor in start_params().items() if name != PROJECTION}
    replies = {}
    for round in range(1, 6):
        asked[round] = Message(params, round=round, client="ada", run="r")
        replies[round] = _ask(store, asked[round])
    assert _ask(store, asked[5]) == replies[5] and endpoint.done.count(("ada", 5)) == 1
    other = Message({name: tensor + 1 for name, tensor in params.items()}, round=4, client="ada", run="r")
    assert _ask(store, other) != replies[4]
    assert endpoint.done.count(("ada", 4)) == 2
    _ask(store, asked[5])  # what followed the dropped round is done again
    assert endpoint.done.count(("ada", 5)) == 2
    with pytest.raises(
        CheckpointError, match="Round 1 was asked again, but this client keeps no state from before round 3"
    ):
        _ask(store, asked[1])
    _ask(store, Message(params, round=1, client="ada", run="another"))  # a run of its own begins without a state


def test_under_local_noise_no_second_question_of_a_round_is_answered(tmp_path: Path) -> None:
    """Each answer would spend privacy that the server's count of rounds does not show."""
    settings = PrivacySettings(mode="local", noise_multiplier=1.0, clip=0.1, noise_seed=1)
    toy = Bench(tmp_path / "run", algorithm=FedAvg(shared="memory"), exchange=Exchange(privacy=settings))
    store, endpoint = store_of(toy, tmp_path / "disk")
    params = {name: tensor for name, tensor in start_params().items() if name != PROJECTION}
    asked = [Message(params, round=round, client="ada", run="r") for round in (1, 2)]
    replies = [_ask(store, message) for message in asked]
    assert [_ask(store, message) for message in asked] == replies
    other = Message({name: tensor + 1 for name, tensor in params.items()}, round=1, client="ada", run="r")
    with pytest.raises(CheckpointError, match="Round 1 was asked again with other rules"):
        _ask(store, other)
    assert [_ask(store, message) for message in asked] == replies and endpoint.done == [("ada", 1), ("ada", 2)]


def _ask(store: OwnStore, message: Message) -> bytes:
    return store("ada", message, {}, lambda facts: None)[0].to_bytes()
