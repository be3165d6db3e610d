"""A client with its own disk trains once a round, whatever the server asks again."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federation_toys import PROJECTION, SIZES, Bench, start_params

from fednl.errors import CheckpointError, FednlError, MessageError
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.exchange import PLAIN, CombineSettings, Exchange, PrivacySettings
from fednl.federation.message import Message
from fednl.federation.own_store import OwnStore
from fednl.federation.params import Params, equal
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.transport import InProcessTransport
from fednl.federation.validate import Wanted

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
    for round in range(1, 7):
        asked[round] = Message(params, round=round, client="ada", run="r")
        replies[round] = _ask(store, asked[round])
    assert _ask(store, asked[6]) == replies[6] and endpoint.done.count(("ada", 6)) == 1
    other = Message({name: tensor + 1 for name, tensor in params.items()}, round=4, client="ada", run="r")
    assert _ask(store, other) != replies[4]
    assert endpoint.done.count(("ada", 4)) == 2
    _ask(store, asked[5])  # what followed the dropped round is done again
    assert endpoint.done.count(("ada", 5)) == 2
    _ask(store, asked[6])
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
    again = [replace(message, attempt=1) for message in asked]
    fresh = [_ask(store, message) for message in again]  # the server went back, and counts these once more
    assert fresh[0] != replies[0] and [_ask(store, message) for message in again] == fresh
    for message in (other, asked[1], replace(other, attempt=1)):
        with pytest.raises(CheckpointError, match="was asked again with other rules"):
            _ask(store, message)


@pytest.mark.parametrize("mode", ["none", "local"])
@pytest.mark.parametrize("first", [1, 2])
def test_clients_keep_what_the_server_goes_back_to_once_rounds_that_failed_are_mended(
    tmp_path: Path, mode: Any, first: int
) -> None:
    """Five failed rounds are taken back, of which the clients keep three newest."""
    privacy = PrivacySettings(mode=mode, noise_seed=1) if mode == "local" else PrivacySettings()
    exchange = Exchange(combine=CombineSettings(weights="uniform"), privacy=privacy) if mode == "local" else PLAIN
    training = TRAINING.model_copy(update={"rounds": 7})
    settings = FederationSettings(quorum=3, max_failed_rounds=5, keep_checkpoints=3)
    whole, toy = bench(tmp_path / "whole" / "run"), bench(tmp_path / "own" / "run")
    for each in (whole, toy):
        each.training, each.settings, each.exchange = training, settings, exchange
    expected = whole.run()
    store, endpoint = store_of(toy, tmp_path / "disk")

    def faulty(client: str, message: Message, *rest: Any) -> Any:
        if message.round >= first and client in ("ada", "bob"):
            raise OSError("a full disk")
        return store(client, message, *rest)

    with pytest.raises(FednlError, match="5 rounds in a row failed"):
        toy.run(OnItsOwn(faulty, SIZES))
    found = toy.run(OnItsOwn(store, SIZES))
    assert [client["status"] for row in toy.rows() for client in row["clients"]] == ["ok"] * 4 * 7
    assert [endpoint.done.count(("cyd", round)) for round in (first, first + 4, 7)] == [2, 2, 1]
    if mode == "none":  # noise is drawn anew
        assert equal(found, expected)


def test_a_late_answer_to_an_earlier_attempt_is_none_to_the_next(tmp_path: Path) -> None:
    asked = [Message(start_params(), round=1, client="ada", run="r", attempt=attempt) for attempt in (0, 1)]
    toy = Bench(tmp_path / "run")
    replies = [toy.endpoint()("ada", message, {}, lambda facts: None)[0].to_bytes() for message in asked]
    wanted = Wanted(start_params(), {}, 1, "r", attempt=1)
    assert wanted.read(replies[1], "ada").attempt == 1
    with pytest.raises(MessageError, match="not for round 1 of this run"):
        wanted.read(replies[0], "ada")
    assert b"attempt" not in asked[0].to_bytes() and b"unsettled" not in asked[0].to_bytes()


@pytest.mark.parametrize("mode", ["none", "local"])
def test_a_client_that_was_not_asked_when_rounds_were_done_again_goes_on_from_before_them(
    tmp_path: Path, mode: Any
) -> None:
    """It answered 5 and 6, which the server took back; then 8 in the attempt after, and 9, taken back by the next."""
    exchange = Exchange(privacy=PrivacySettings(mode=mode, noise_seed=1)) if mode == "local" else PLAIN
    toy = Bench(tmp_path / "run", algorithm=FedAvg(shared="memory"), exchange=exchange)
    inner, came = toy.endpoint(), dict[tuple[int, int], Params]()

    def endpoint(client: str, message: Message, state: Any, tell: Any) -> Any:
        came[message.attempt, message.round] = state
        return inner(client, message, state, tell)

    store = OwnStore(endpoint, tmp_path / "disk", {f"private/{PROJECTION}": start_params()[PROJECTION]})
    params = {name: tensor for name, tensor in start_params().items() if name != PROJECTION}

    def ask(round: int, *begun: int) -> bytes:
        return _ask(store, Message(params, round=round, client="ada", run="r", attempt=len(begun), begun=begun))

    for round in (4, 5, 6):
        ask(round)
    after_four = came[0, 5]
    ask(7, 5)
    assert equal(came[1, 7], after_four) and not equal(came[0, 6], after_four)
    ask(9, 5)
    after_seven = came[1, 9]
    assert not equal(after_seven, after_four)
    ask(10, 5, 9)
    assert equal(came[2, 10], after_seven)
    ask(4, 5, 9, 1)
    assert equal(came[3, 4], {f"private/{PROJECTION}": start_params()[PROJECTION]})


@pytest.mark.parametrize(("keep", "told"), [(2, 3), (6, 3)])
def test_a_message_says_what_is_unsettled_only_where_a_client_would_not_keep_it_anyway(
    tmp_path: Path, keep: int, told: int
) -> None:
    """A client of before reads no message with a field that it does not know."""
    toy = bench(tmp_path / "run")
    toy.training = TRAINING.model_copy(update={"rounds": 9})
    toy.settings = FederationSettings(max_failed_rounds=8, keep_checkpoints=keep)
    transport = toy.transport(lambda replies: [replace(one, status="lost", reason="lost") for one in replies])
    with pytest.raises(FednlError, match="8 rounds in a row failed"):
        toy.run(transport)
    rounds = {message.round: message for message in transport.sent}
    assert [rounds[n].unsettled for n in range(1, 9)] == [n - 1 if n > told else 0 for n in range(1, 9)]
    assert [b"unsettled" in rounds[n].to_bytes() for n in range(1, 9)] == [n > told for n in range(1, 9)]
    again = toy.transport()
    toy.run(again, stop_after=2)
    assert [(one.round, one.attempt, one.begun) for one in again.sent[::4]] == [(1, 1, (1,)), (2, 1, (1,))]


def _ask(store: OwnStore, message: Message) -> bytes:
    return store("ada", message, {}, lambda facts: None)[0].to_bytes()
