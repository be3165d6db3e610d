from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import GATE, PROJECTION, SIZES, WRITE, Bench, forge, start_params

from fednl.errors import DataError, FednlError, Interrupted, SettingsError
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.checkpoint import read_tensors
from fednl.federation.combine import InOrder
from fednl.federation.loop import sample_clients
from fednl.federation.message import Message
from fednl.federation.params import Params, equal, finite, weighted_mean
from fednl.federation.record import Validation
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.transport import InProcessTransport, Reply, SimulatedTransport
from fednl.federation.workers import InlinePool, ProcessTransport, train_handler

ONE_ROUND = TrainingSettings(rounds=1, local_steps=2)


def bench(path: Path, **fields: Any) -> Bench:
    return Bench(path / "run", **fields)


def test_a_round_is_the_mean_weighted_by_examples(tmp_path: Path) -> None:
    toy = bench(tmp_path, training=ONE_ROUND)
    transport = toy.transport()
    params = toy.run(transport)
    replies = [Message.from_bytes(reply.payload) for reply in transport.returned]
    expected = weighted_mean([(reply.params, SIZES[reply.client]) for reply in replies])
    torch.testing.assert_close(params, expected, rtol=0, atol=1e-7)
    assert not equal(params, start_params())


def test_rows_say_who_did_what_and_bytes_are_those_serialised(tmp_path: Path) -> None:
    toy = bench(tmp_path)
    transport = toy.transport()
    toy.run(transport)
    rows = toy.rows()
    assert [row["round"] for row in rows] == [1, 2, 3]
    down = {(message.round, message.client): message.size_bytes for message in transport.sent}
    up = {(Message.from_bytes(r.payload).round, r.client): len(r.payload) for r in transport.returned}
    for row in rows:
        assert [client["name"] for client in row["clients"]] == sorted(SIZES)
        assert row["updated"] is True
        assert row["refused"] == {}
        for client in row["clients"]:
            key = (row["round"], client["name"])
            assert (client["down_bytes"], client["up_bytes"]) == (down[key], up[key])
            assert (client["num_examples"], client["steps"], client["status"]) == (
                SIZES[client["name"]],
                3,
                "ok",
            )
            assert client["seconds_s"] >= 0
        mean = sum(client["loss"] * client["num_examples"] for client in row["clients"]) / sum(SIZES.values())
        assert row["metrics"]["train_loss"] == pytest.approx(mean, rel=1e-12)
    assert rows[-1]["metrics"]["train_loss"] < rows[0]["metrics"]["train_loss"]


def test_no_name_outside_the_allow_list_is_ever_in_a_message(tmp_path: Path) -> None:
    toy = bench(tmp_path, algorithm=FedAvg(shared="memory"))
    transport = toy.transport()
    params = toy.run(transport)
    allowed = {f"params/{WRITE}", f"params/{GATE}"}
    payloads = [reply.payload for reply in transport.returned] + [m.to_bytes() for m in transport.sent]
    assert len(payloads) == 2 * 3 * len(SIZES)
    for payload in payloads:
        length = int.from_bytes(payload[:8], "little")
        assert set(json.loads(payload[8 : 8 + length])) - {"__metadata__"} == allowed
        assert b"projection" not in payload
    states = transport.states()
    assert torch.equal(params[PROJECTION], start_params()[PROJECTION])
    kept = [states[client][f"private/{PROJECTION}"] for client in sorted(SIZES)]
    assert all(not torch.equal(tensor, start_params()[PROJECTION]) for tensor in kept)
    assert not torch.equal(kept[0], kept[2])


def test_a_client_without_examples_takes_part_as_zero_and_is_listed(tmp_path: Path) -> None:
    with_empty = bench(tmp_path / "a", sizes={**SIZES, "eve": 0})
    without = bench(tmp_path / "b")
    assert equal(with_empty.run(), without.run())
    for row in with_empty.rows():
        eve = row["clients"][-1]
        assert (eve["name"], eve["num_examples"], eve["status"], eve["steps"]) == ("eve", 0, "empty", 0)
        assert "loss" not in eve
        assert row["updated"] is True


def test_all_clients_empty_stops_before_round_one(tmp_path: Path) -> None:
    toy = bench(tmp_path, sizes={"ada": 0, "bob": 0})
    transport = toy.transport()
    with pytest.raises(DataError, match="None of the 2 clients"):
        toy.run(transport)
    assert transport.sent == []
    assert toy.rows() == []
    with pytest.raises(DataError):
        bench(tmp_path, sizes={}).run()


def test_a_round_of_empty_clients_only_keeps_the_rules_and_says_so(tmp_path: Path) -> None:
    toy = bench(tmp_path, sizes={"ada": 0, "bob": 0}, training=ONE_ROUND)
    transport = InProcessTransport(toy.endpoint(), ["ada", "bob"])
    with pytest.raises(FednlError, match="None of the 1 rounds changed the rules"):
        toy.run(transport)
    assert equal(read_tensors(toy.path / "final/params.safetensors")[0], start_params())
    assert toy.rows()[0]["updated"] is False
    assert "no client that was asked has examples" in toy.rows()[0]["reason"]


NAN = {WRITE: torch.full((3,), float("nan")), GATE: torch.tensor(0.0), PROJECTION: torch.zeros(3)}
GOOD = {name: torch.zeros_like(value) for name, value in NAN.items()}

FAULTS: list[tuple[str, Callable[[Reply], Reply]]] = [
    ("unknown-name", lambda r: forge(r, params={**GOOD, "layers.0.memory.state": torch.ones(2)})),
    ("missing-name", lambda r: forge(r, params={WRITE: GOOD[WRITE]})),
    ("shape", lambda r: forge(r, params={**GOOD, WRITE: torch.zeros(4)})),
    ("dtype", lambda r: forge(r, params={**GOOD, WRITE: torch.zeros(3, dtype=torch.float64)})),
    ("non-finite", lambda r: forge(r, params=NAN)),
    ("non-finite", lambda r: forge(r, params={**GOOD, GATE: torch.tensor(float("inf"))})),
    ("num-examples", lambda r: forge(r, num_examples=-200)),
    ("num-examples", lambda r: forge(r, num_examples=10**15)),
    ("num-examples", lambda r: forge(r, num_examples=True)),
    ("num-examples", lambda r: forge(r, num_examples=1e15)),
    ("unknown-client", lambda r: forge(r, client="bob")),
    ("malformed", lambda r: replace(r, payload=r.payload[:-5])),
    ("malformed", lambda r: replace(r, payload=b"\x80\x04\x95 not a tensor")),
    ("malformed", lambda r: replace(r, payload=(2**60).to_bytes(8, "little") + b"{}")),
]


@pytest.mark.parametrize(("code", "fault"), FAULTS)
def test_a_bad_reply_is_refused_and_counted_and_the_round_goes_on(
    tmp_path: Path, code: str, fault: Callable[[Reply], Reply]
) -> None:
    toy = bench(tmp_path / "a", training=ONE_ROUND)
    params = toy.run(toy.transport(lambda replies: [fault(r) if r.client == "cyd" else r for r in replies]))
    row = toy.rows()[0]
    assert row["refused"] == {code: 1}
    assert row["updated"] is True
    cyd = row["clients"][2]
    assert (cyd["name"], cyd["status"], cyd["reason"]) == ("cyd", "refused", code)
    assert "num_examples" not in cyd
    assert [client["status"] for client in row["clients"]] == ["ok", "ok", "refused", "ok"]
    without = bench(tmp_path / "b", training=ONE_ROUND)
    expected = without.run(without.transport(lambda replies: [r for r in replies if r.client != "cyd"]))
    assert equal(params, expected)


def test_a_duplicate_is_refused_and_the_first_reply_counts(tmp_path: Path) -> None:
    def twice(replies: list[Reply]) -> list[Reply]:
        return [*replies, forge(replies[0], params=GOOD), replies[1]]

    toy, plain = bench(tmp_path / "a"), bench(tmp_path / "b")
    assert equal(toy.run(toy.transport(twice)), plain.run())
    assert [row["refused"] for row in toy.rows()] == [{"duplicate": 2}] * 3
    assert {client["status"] for client in toy.rows()[0]["clients"]} == {"ok"}


def test_a_stale_reply_is_refused_and_the_fresh_one_still_counts(tmp_path: Path) -> None:
    old: list[Reply] = []

    def late(replies: list[Reply]) -> list[Reply]:
        came = [*old, *replies]
        old[:] = replies[:1]
        return came

    toy, plain = bench(tmp_path / "a"), bench(tmp_path / "b")
    assert equal(toy.run(toy.transport(late)), plain.run())
    assert [row["refused"] for row in toy.rows()] == [{}, {"stale-round": 1}, {"stale-round": 1}]
    for row in toy.rows():
        assert {client["status"] for client in row["clients"]} == {"ok"}
        assert all("reason" not in client for client in row["clients"])


def test_a_stale_reply_alone_leaves_the_client_late(tmp_path: Path) -> None:
    toy = bench(tmp_path, training=ONE_ROUND)
    toy.run(toy.transport(lambda replies: [forge(replies[0], round=0), *replies[1:]]))
    row = toy.rows()[0]
    assert row["refused"] == {"stale-round": 1}
    assert (row["clients"][0]["status"], row["clients"][0]["reason"]) == ("late", "stale-round")


def test_a_reply_of_another_run_or_of_a_stranger_is_refused(tmp_path: Path) -> None:
    def change(replies: list[Reply]) -> list[Reply]:
        return [forge(replies[0], run="other"), *replies[1:], replace(replies[0], client="mallory")]

    toy = bench(tmp_path, training=ONE_ROUND)
    toy.run(toy.transport(change))
    assert toy.rows()[0]["refused"] == {"stale-round": 1, "unknown-client": 1}


def test_a_client_that_raises_has_failed_and_its_words_stay_with_it(tmp_path: Path) -> None:
    toy = bench(tmp_path, training=ONE_ROUND)
    inner = toy.endpoint()

    def endpoint(client: str, *rest: Any) -> Any:
        if client == "ada":
            raise ValueError("patient Ada, born Byron")
        if client == "bob":
            raise DataError("the file is empty.")
        return inner(client, *rest)

    toy.run(InProcessTransport(endpoint, SIZES))
    first, second = toy.rows()[0]["clients"][:2]
    assert (first["status"], first["reason"]) == ("failed", "ValueError")
    assert first["detail"].startswith("test_loop.py:")
    assert (second["reason"], second["detail"]) == ("DataError", "the file is empty.")
    assert "Byron" not in (toy.path / "rounds.jsonl").read_text()
    assert "Byron" not in str(toy.events)


def test_a_diverged_client_is_refused_and_healthy_again_in_the_next_round(tmp_path: Path) -> None:
    toy = bench(tmp_path)
    inner = toy.endpoint()

    def endpoint(client: str, message: Message, *rest: Any) -> Any:
        if client == "ada" and message.round == 2:
            message = replace(message, params={**message.params, WRITE: torch.full((3,), float("nan"))})
        return inner(client, message, *rest)

    params = toy.run(InProcessTransport(endpoint, SIZES))
    assert [row["refused"] for row in toy.rows()] == [{}, {"non-finite": 1}, {}]
    assert finite(params)


def test_below_the_quorum_the_rules_stay_and_the_run_says_why(tmp_path: Path) -> None:
    toy = bench(tmp_path, settings=FederationSettings(quorum=4, max_failed_rounds=3))
    seen: list[Params] = []

    def lose(replies: list[Reply]) -> list[Reply]:
        return [forge(r, params=NAN) if r.client == "dan" else r for r in replies]

    with pytest.raises(FednlError, match=r'3 rounds in a row .*quorum = 4, first "dan" \(refused, non-finite\)'):
        toy.run(toy.transport(lose), validate_round=lambda round, params: seen.append(params) or Validation())
    assert len(seen) == 3
    assert all(equal(params, start_params()) for params in seen)
    assert [row["updated"] for row in toy.rows()] == [False] * 3
    assert "3 valid replies are fewer than quorum = 4" in toy.rows()[0]["reason"]


def test_failed_rounds_are_counted_in_a_row(tmp_path: Path) -> None:
    rounds = iter([True, False, True, False, True])
    toy = bench(
        tmp_path,
        settings=FederationSettings(quorum=4, max_failed_rounds=2),
        training=TrainingSettings(rounds=5, local_steps=1),
    )
    toy.run(toy.transport(lambda replies: replies[:3] if next(rounds) else replies))
    assert [row["updated"] for row in toy.rows()] == [False, True, False, True, False]
    assert toy.rows()[0]["clients"][3]["status"] == "late"


def test_clients_without_examples_count_for_the_quorum(tmp_path: Path) -> None:
    toy = bench(tmp_path, sizes={"ada": 3, "bob": 0}, settings=FederationSettings(quorum=2), training=ONE_ROUND)
    toy.run()
    assert toy.rows()[0]["updated"] is True


class Explodes(FedAvg):
    def server_step(self, params: Params, combined: Message, server_state: Params) -> tuple[Params, Params]:
        return {name: tensor / 0 for name, tensor in params.items()}, {}


def test_a_server_step_that_explodes_is_not_taken(tmp_path: Path) -> None:
    toy = bench(tmp_path, algorithm=Explodes(shared="all"), training=ONE_ROUND)
    with pytest.raises(FednlError, match="None of the 1 rounds changed the rules"):
        toy.run()
    left, _ = read_tensors(tmp_path / "run/final/params.safetensors")
    assert equal(left, start_params())
    assert "NaN or infinity" in toy.rows()[0]["reason"]


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize(("slow", "seconds_s"), [("ada", 1.5), ("bob", 9.0), ("", 0.0)])
def test_a_deadline_drops_who_is_late_and_nobody_whose_turn_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: bool, slow: str, seconds_s: float
) -> None:
    """Four clients of 0.9 s each, one after the other, keep a deadline of 1 s; the clock is the test's own."""
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    toy = bench(tmp_path, settings=FederationSettings(deadline_s=1.0))
    inner = toy.endpoint()

    def endpoint(client: str, *rest: Any) -> Any:
        now_s[0] += seconds_s if client == slow else 0.9
        return inner(client, *rest)

    transport: SimulatedTransport = InProcessTransport(endpoint, SIZES)
    if inline:
        transport = ProcessTransport(InlinePool({"train": train_handler(endpoint)}), SIZES)
    held: list[int] = []

    class Counted(InOrder):
        def put(self, client: str, message: Message | None) -> Iterator[Message]:
            yield from super().put(client, message)
            held.append(len(self._came))

    monkeypatch.setattr("fednl.federation.loop.InOrder", Counted)
    toy.run(transport)
    assert held == [0] * 4 * len(toy.rows()), "who was given up is waited for, and the others' replies with it"
    for row in toy.rows():
        assert {client["name"]: client["status"] for client in row["clients"]} == {
            client: "late" if client == slow else "ok" for client in SIZES
        }
    for client, state in transport.states().items():
        assert any(name.startswith("optimizer/") for name in state) == (client != slow)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (FederationSettings(clients_per_round=9), "clients-per-round = 9"),
        (FederationSettings(quorum=5), "quorum = 5"),
    ],
)
def test_more_clients_than_there_are_is_refused(tmp_path: Path, settings: FederationSettings, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        bench(tmp_path, settings=settings).run()


def test_shared_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match='"lora"'):
        bench(tmp_path, algorithm=FedAvg(shared="lora")).run()


def test_sampling_is_by_seed_round_and_name_alone() -> None:
    clients = [f"client {number}" for number in range(20)]
    drawn = [sample_clients(clients, 5, 3, round) for round in range(1, 9)]
    assert drawn == [sample_clients(clients[::-1], 5, 3, round) for round in range(1, 9)]
    assert len({tuple(names) for names in drawn}) == 8
    assert all(len(set(names)) == 5 and names == sorted(names) for names in drawn)
    assert drawn[0] != sample_clients(clients, 5, 4, 1)
    # A newcomer can only take a place; nobody who was not drawn before comes in with it.
    for round, names in enumerate(drawn, 1):
        assert set(sample_clients([*clients, "newcomer"], 5, 3, round)) <= {*names, "newcomer"}
    assert sample_clients(clients, 0, 3, 1) == sorted(clients)


def test_partial_participation_asks_and_lists_only_those_drawn(tmp_path: Path) -> None:
    toy = bench(tmp_path, settings=FederationSettings(clients_per_round=2))
    transport = toy.transport()
    toy.run(transport)
    for row in toy.rows():
        names = [client["name"] for client in row["clients"]]
        assert names == sample_clients(list(SIZES), 2, toy.seed, row["round"])
        assert names == sorted(message.client for message in transport.sent if message.round == row["round"])


def test_events_carry_what_a_display_needs(tmp_path: Path) -> None:
    toy = bench(tmp_path, training=TrainingSettings(rounds=2, local_steps=3))
    toy.run(InProcessTransport(toy.endpoint(), SIZES))
    kinds = [event["event"] for event in toy.events]
    one_round = ["round-start", *(["step"] * 3 + ["client-done"]) * 4, "round-end"]
    assert kinds == ["note", *one_round * 2]
    assert all(event["rounds"] == 2 for event in toy.events)
    assert [event["round"] for event in toy.events] == [1] * (1 + len(one_round)) + [2] * len(one_round)
    steps = [event for event in toy.events if event["event"] == "step"]
    assert [event["done"] for event in steps] == list(range(1, 25))
    assert {event["total"] for event in steps} == {24}
    assert [event["step"] for event in steps[:4]] == [1, 2, 3, 1]
    assert all(event["steps"] == 3 and event["loss"] > 0 and event["client"] in SIZES for event in steps)
    done = [event for event in toy.events if event["event"] == "client-done"]
    assert [(event["done"], event["total"]) for event in done] == [(n, 4) for n in (1, 2, 3, 4)] * 2
    end = toy.events[-1]
    assert end["updated"] is True
    assert end["seconds_s"] > 0
    assert end["loss"] == end["metrics"]["train_loss"]


def test_final_and_best_are_left_behind(tmp_path: Path) -> None:
    toy = bench(tmp_path)
    seen: dict[int, Params] = {}
    losses = {1: 0.5, 2: 0.2, 3: 0.9}

    def validate(round: int, params: Params) -> Validation:
        seen[round] = {name: tensor.clone() for name, tensor in params.items()}
        for tensor in params.values():
            tensor.zero_()
        return Validation({"loss": losses[round], "accuracy": 0.25, "odd": float("nan")})

    params = toy.run(validate_round=validate)
    final, header = read_tensors(toy.path / "final" / "params.safetensors")
    assert equal(final, params)
    assert header == {"round": 3}
    best, header = read_tensors(toy.path / "best" / "params.safetensors")
    assert equal(best, seen[2])
    assert header == {"round": 2}
    assert [row["metrics"]["validation_loss"] for row in toy.rows()] == [0.5, 0.2, 0.9]
    assert toy.rows()[0]["metrics"]["validation_accuracy"] == 0.25
    assert "validation_odd" not in toy.rows()[0]["metrics"]


def test_arms_live_in_their_own_folders(tmp_path: Path) -> None:
    toy = bench(tmp_path)
    toy.run(folder="arms/local")
    assert (toy.path / "arms/local/final/params.safetensors").is_file()
    assert (toy.path / "arms/local/checkpoints/round-3").is_dir()
    assert len(toy.run_folder.read_jsonl("arms/local/rounds.jsonl")) == 3
    assert not (toy.path / "rounds.jsonl").exists()


def test_ctrl_c_leaves_a_usable_run_and_says_how_to_go_on(tmp_path: Path) -> None:
    toy = bench(tmp_path)
    plain = bench(tmp_path / "plain")
    two = plain.run(stop_after=2)

    def stop(event: Any) -> None:
        if event["event"] == "step" and event["round"] == 3 and event["client"] == "cyd":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=f"--resume {toy.path}"):
        toy.run(on_event=stop)
    assert equal(read_tensors(toy.path / "final" / "params.safetensors")[0], two)
    assert len(toy.rows()) == 2
    assert equal(toy.run(), plain.run())


def test_the_given_rules_are_not_modified_and_the_result_is_new(tmp_path: Path) -> None:
    from fednl.federation.loop import run_rounds

    toy = bench(tmp_path)
    given = start_params()
    made = run_rounds(
        toy.algorithm,
        toy.transport(),
        given,
        toy.settings,
        toy.training,
        toy.run_folder,
        seed=1,
        stop_after=0,
    )
    for tensor in made.values():
        tensor.add_(1.0)
    assert equal(given, start_params())
