"""A run that was killed and resumed ends with the bits of the one that was not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import LORA_A, LORA_B, SIZES, Bench, in_parts, own_settings, start_params

from fednl.errors import CheckpointError, FednlError
from fednl.federation import checkpoint as checkpoint_module
from fednl.federation.accounting import Spent, epsilon_of
from fednl.federation.algorithms import ALGORITHMS
from fednl.federation.checkpoint import read_tensors
from fednl.federation.exchange import PLAIN, CombineSettings, Exchange, PrivacySettings, TrafficSettings
from fednl.federation.loop import sample_clients
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, equal
from fednl.federation.privacy import PrivateSum
from fednl.federation.record import Validation
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.transport import InProcessTransport

ROUNDS = 4
TRAINING = TrainingSettings(
    rounds=ROUNDS, local_steps=2, batch=3, schedule="cosine", warmup_steps=2, optimizer_state="keep"
)
SETTINGS = FederationSettings(clients_per_round=3, quorum=2)


class Crash(BaseException):
    """The process is killed: nothing after this line runs."""


def bench(path: Path, kind: str = "fedavgm", shared: str = "memory") -> Bench:
    algorithm = ALGORITHMS[kind](own_settings(kind), shared)
    lora = algorithm.traits.needs_lora
    if lora:
        algorithm.lets_out = (shared, "lora")
    return Bench(path, algorithm=algorithm, settings=SETTINGS, training=TRAINING, lora=lora)


def score(round: int, params: Params) -> Validation:
    return Validation({"loss": [0.4, 0.3, 0.7, 0.5][round - 1]})


def outcome(toy: Bench, transport: Any, params: Params) -> tuple[Params, ClientState, bytes, list[Any]]:
    """All that must be the same: rules, every private tensor, server state, and the rows but for seconds."""
    states = {f"{client}/{n}": t for client, state in transport.states().items() for n, t in state.items()}
    newest = checkpoint_module.load_newest(toy.path / "checkpoints")
    assert newest is not None
    server = {f"server/{name}": tensor for name, tensor in newest.server_state.items()}
    rows = toy.rows()
    for row in rows:
        del row["seconds_s"]
        for client in row["clients"]:
            for name in ("seconds_s", "cpu_s", "up_bytes", "up_container_bytes"):
                client.pop(name, None)
    return params, {**states, **server}, (toy.path / "best" / "params.safetensors").read_bytes(), rows


def without_down_bytes(found: Any) -> Any:
    """The same without the sizes of the server's messages, which name the attempt at a round that is done again."""
    for client in (client for row in found[3] for client in row["clients"]):
        del client["down_bytes"], client["down_container_bytes"]
    return found


def same(left: Any, right: Any) -> bool:
    return equal(left[0], right[0]) and equal(left[1], right[1]) and left[2:] == right[2:]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    toy = bench(tmp_path_factory.mktemp("whole") / "run")
    transport = toy.transport()
    return outcome(toy, transport, toy.run(transport, validate_round=score))


def resumed(toy: Bench) -> Any:
    transport = toy.transport()
    return outcome(toy, transport, toy.run(transport, validate_round=score))


def test_the_case_is_not_trivial(uninterrupted: Any) -> None:
    params, tensors, _, rows = uninterrupted
    assert not equal(params, start_params())
    assert [name for name in tensors if "/optimizer/exp_avg/" in name]
    assert [name for name in tensors if "/private/" in name]
    assert [name for name in tensors if name.startswith("server/momentum/")]
    assert len({tuple(client["name"] for client in row["clients"]) for row in rows}) > 1


@pytest.mark.parametrize("after", range(ROUNDS + 1))
def test_stopped_after_any_round(tmp_path: Path, uninterrupted: Any, after: int) -> None:
    toy = bench(tmp_path / "run")
    toy.run(validate_round=score, stop_after=after)
    assert len(toy.rows()) == after
    assert same(resumed(toy), uninterrupted)


@pytest.mark.parametrize("round", range(1, ROUNDS + 1))
@pytest.mark.parametrize("kind", ["round-start", "step", "client-done", "round-end"])
def test_killed_anywhere_in_any_round(tmp_path: Path, uninterrupted: Any, round: int, kind: str) -> None:
    toy = bench(tmp_path / "run")

    def kill(event: Any) -> None:
        if (event["event"], event["round"]) == (kind, round):
            raise Crash

    with pytest.raises(Crash):
        toy.run(validate_round=score, on_event=kill)
    assert same(resumed(toy), uninterrupted)


@pytest.mark.parametrize("victim", ["params", "client-ada", "state.json", "rename", "row", "best"])
@pytest.mark.parametrize("round", [1, 2])
def test_killed_while_a_round_is_written(
    tmp_path: Path, uninterrupted: Any, monkeypatch: Any, victim: str, round: int
) -> None:
    toy = bench(tmp_path / "run")
    folder = toy.path / "checkpoints" / f".round-{round}.tmp"
    real_write, real_replace = checkpoint_module._write_through, os.replace

    def torn(path: Path, content: bytes) -> None:
        if path.parent == folder and path.name.startswith(victim):
            path.write_bytes(content[: len(content) // 2])
            raise Crash
        real_write(path, content)

    def replace(source: Any, target: Any) -> None:
        hit = {"rename": Path(target).name == f"round-{round}", "best": Path(target).parent.name == "best"}
        if hit.get(victim, False):
            raise Crash
        real_replace(source, target)

    def append(self: Any, name: str, row: Any) -> None:
        with open(self.path / name, "a") as file:
            file.write('{"round": ')
        raise Crash

    if round == 2:
        toy.run(validate_round=score, stop_after=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_write_through", torn)
        patch.setattr(os, "replace", replace)
        if victim == "row":
            patch.setattr(type(toy.run_folder), "append_jsonl", append)
        with pytest.raises(Crash):
            toy.run(validate_round=score)
    assert same(resumed(toy), uninterrupted)


def test_a_damaged_newest_checkpoint_costs_a_round_and_no_bits(tmp_path: Path, uninterrupted: Any) -> None:
    toy = bench(tmp_path / "run")
    toy.run(validate_round=score, stop_after=3)
    path = toy.path / "checkpoints" / "round-3" / "params.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    toy.events.clear()
    assert same(resumed(toy), uninterrupted)
    assert "round-3" in toy.events[0]["text"]
    assert [event["round"] for event in toy.events if event["event"] == "round-start"] == [3, 4]


def faulty_from(toy: Bench, first: int) -> InProcessTransport:
    """Two of four clients fail from a round on, under a quorum of three."""
    inner = toy.endpoint()

    def endpoint(client: str, message: Message, *rest: Any) -> Any:
        if message.round >= first and client in ("ada", "bob"):
            raise OSError("a full disk")
        return inner(client, message, *rest)

    return InProcessTransport(endpoint, SIZES)


@pytest.mark.parametrize(("first", "most"), [(1, 2), (1, 9), (3, 2), (2, 4), (5, 2)])
def test_a_run_that_failed_leaves_its_rules_and_once_mended_ends_as_if_nothing_had_been(
    tmp_path: Path, first: int, most: int
) -> None:
    whole, toy = bench(tmp_path / "whole"), bench(tmp_path / "run")
    for each in (whole, toy):
        each.settings = FederationSettings(quorum=3, max_failed_rounds=most)
        each.training = TRAINING.model_copy(update={"rounds": 6})
    score_six = lambda round, params: Validation({"loss": [0.4, 0.3, 0.7, 0.5, 0.2, 0.6][round - 1]})  # noqa: E731
    transport = whole.transport()
    expected = without_down_bytes(outcome(whole, transport, whole.run(transport, validate_round=score_six)))
    stopped = min(first - 1 + most, 6)
    for _ in range(2):  # with the fault still there, the same rounds fail again, and so does the run
        with pytest.raises(FednlError, match=r"rounds in a row failed|rounds changed the rules"):
            toy.run(faulty_from(toy, first), validate_round=score_six)
        assert [row["updated"] for row in toy.rows()] == [round < first for round in range(1, stopped + 1)]
        left, header = read_tensors(toy.path / "final/params.safetensors")
        assert header == {"round": stopped, **({"updates": 0} if first == 1 else {})}
        assert first > 1 or equal(left, start_params())
        assert (toy.path / "best/params.safetensors").exists()
    toy.events.clear()
    transport = toy.transport()
    found = outcome(toy, transport, toy.run(transport, validate_round=score_six))
    assert same(without_down_bytes(found), expected)
    assert toy.events[0]["text"] == f"rounds {first} to {stopped} changed nothing, so they are done again"
    kept = {path.name for path in (toy.path / "checkpoints").iterdir()}
    assert kept == {path.name for path in (whole.path / "checkpoints").iterdir()}


@pytest.mark.parametrize("first", [1, 2])
def test_what_failed_rounds_have_spent_of_a_budget_stays_spent(tmp_path: Path, first: int) -> None:
    toy = bench(tmp_path / "run", "fedavg")
    toy.settings = FederationSettings(quorum=3, max_failed_rounds=2)
    privacy = PrivacySettings(mode="central", noise_seed=1)
    toy.exchange = Exchange(combine=CombineSettings(weights="uniform"), privacy=privacy)
    with pytest.raises(FednlError, match="2 rounds in a row failed"):
        toy.run(faulty_from(toy, first))
    toy.run()
    assert toy.rows()[-1]["metrics"]["epsilon"] == epsilon_of([(1.0, 1.0, ROUNDS + 2)], privacy.delta)


def test_a_round_that_is_done_again_asks_other_clients_and_after_a_kill_the_same_others(tmp_path: Path) -> None:
    """One client is gone for good, and a round needs all that it asks."""
    toy = Bench(tmp_path / "run", training=TrainingSettings(rounds=1, local_steps=1), seed=1)
    toy.settings = FederationSettings(clients_per_round=2, quorum=2, max_failed_rounds=1)
    inner = toy.endpoint()

    def endpoint(client: str, message: Message, *rest: Any) -> Any:
        if client == "bob":
            raise OSError("gone")
        return inner(client, message, *rest)

    def kill(event: Any) -> None:
        toy.events.append(event)
        if event["event"] == "client-done":
            raise Crash

    def asked() -> list[list[str]]:
        return [event["clients"] for event in toy.events if event["event"] == "round-start"]

    with pytest.raises(FednlError, match="1 rounds in a row failed"):
        toy.run(InProcessTransport(endpoint, SIZES))
    assert asked() == [["bob", "dan"]] == [sample_clients(list(SIZES), 2, toy.seed, 1)]
    with pytest.raises(Crash):
        toy.run(InProcessTransport(endpoint, SIZES), on_event=kill)
    toy.run(InProcessTransport(endpoint, SIZES))
    assert asked()[1] == asked()[2] != asked()[0]
    assert [row["updated"] for row in toy.rows()] == [True]


def test_what_noise_draws_in_a_round_that_is_done_again_is_drawn_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fednl.federation.accounting.epsilon_of", lambda releases, delta: 1.0)
    toy = Bench(tmp_path / "run", training=TrainingSettings(rounds=1, local_steps=1))
    toy.settings = FederationSettings(clients_per_round=1, max_failed_rounds=1)
    privacy = PrivacySettings(mode="central", noise_seed=5)
    toy.exchange = Exchange(combine=CombineSettings(weights="uniform"), privacy=privacy)
    with pytest.raises(FednlError, match="quorum = 1, the coins of central noise drew 0 of 4 clients; mend"):
        toy.run()
    toy.run()
    assert [event["clients"] for event in toy.events if event["event"] == "round-start"] == [[], ["cyd"]]
    sums = [PrivateSum(privacy, Spent(7, 1.0), 4, 1, attempt).starting_from(start_params()) for attempt in (0, 0, 1)]
    for one in sums:
        one.add(Message(start_params(), num_examples=1))
    first, same_again, another = (one.result().params for one in sums)
    assert equal(first, same_again) and not equal(first, another)


def test_a_budget_that_failed_rounds_have_spent_is_not_called_too_small_for_any_round(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run", "fedavg")
    toy.settings = FederationSettings(quorum=3, max_failed_rounds=2)
    budget = epsilon_of([(1.0, 1.0, 2)], 1e-5) + 0.01
    privacy = PrivacySettings(mode="central", noise_seed=1, delta=1e-5, epsilon=budget)
    toy.exchange = Exchange(combine=CombineSettings(weights="uniform"), privacy=privacy)
    with pytest.raises(FednlError, match="2 rounds in a row failed"):
        toy.run(faulty_from(toy, 1))
    with pytest.raises(FednlError, match=r"of which rounds that failed have spent 7\.[0-9]+, .* start a new run"):
        toy.run()


@pytest.mark.parametrize("stop", ["failure", "pause"])
def test_the_checkpoint_that_final_rules_are_of_stays_until_they_are_of_another(tmp_path: Path, stop: str) -> None:
    toy = bench(tmp_path / "run")
    toy.settings = FederationSettings(quorum=3, max_failed_rounds=2)
    toy.training = TRAINING.model_copy(update={"rounds": 7})

    def there() -> set[int]:
        return {int(path.name.removeprefix("round-")) for path in (toy.path / "checkpoints").iterdir()}

    def kill(event: Any) -> None:
        if (event["event"], event.get("round")) == ("round-start", 7):
            raise Crash

    if stop == "failure":
        with pytest.raises(FednlError, match="2 rounds in a row failed"):
            toy.run(faulty_from(toy, 3))
    else:
        toy.run(stop_after=2)
    with pytest.raises(Crash):
        toy.run(on_event=kill)
    assert read_tensors(toy.path / "final/params.safetensors")[1] == {"round": 2}
    assert there() == {2, 5, 6}
    toy.run()
    assert there() == {6, 7}


def test_failed_rounds_below_the_limit_are_not_done_again(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run")
    toy.settings = FederationSettings(quorum=3, max_failed_rounds=3)
    toy.run(faulty_from(toy, 3))
    toy.events.clear()
    toy.run()
    assert toy.events == []
    assert [row["updated"] for row in toy.rows()] == [True, True, False, False]


def test_of_a_failed_run_with_too_few_checkpoints_the_newest_counts(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run")
    toy.settings = FederationSettings(quorum=3, max_failed_rounds=2)
    with pytest.raises(FednlError, match="2 rounds in a row failed"):
        toy.run(faulty_from(toy, 2))
    shutil.rmtree(toy.path / "checkpoints" / "round-1")
    toy.run()
    assert [row["updated"] for row in toy.rows()] == [True, False, False, True]


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run")
    params = toy.run()
    toy.events.clear()
    assert equal(toy.run(), params)
    assert toy.events == []


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_every_algorithm_resumes(tmp_path: Path, kind: str) -> None:
    whole, parts = bench(tmp_path / "a", kind), bench(tmp_path / "b", kind)
    in_parts(whole, parts, (1, 2))


def change_seed(toy: Bench) -> None:
    toy.seed = 99


def change_shared(toy: Bench) -> None:
    toy.algorithm = type(toy.algorithm)(shared="theta")


def change_algorithm(toy: Bench) -> None:
    toy.algorithm = ALGORITHMS["fedavg"](shared="memory")


def change_rate(toy: Bench) -> None:
    toy.training = toy.training.model_copy(update={"local_lr": 0.5})


def change_clients(toy: Bench) -> None:
    toy.sizes = {**SIZES, "eve": 3}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (change_seed, "seed"),
        (change_shared, "shared"),
        (change_algorithm, "algorithm"),
        (change_rate, "training"),
        (change_clients, "clients"),
    ],
)
def test_other_settings_do_not_go_on_from_these_checkpoints(tmp_path: Path, change: Any, key: str) -> None:
    toy = bench(tmp_path / "run")
    toy.run(stop_after=1)
    change(toy)
    with pytest.raises(CheckpointError, match=f"have {key} = "):
        toy.run()


@pytest.mark.parametrize("first", [PLAIN, Exchange(TrafficSettings(up="float16"))])
def test_neither_going_over_to_another_traffic_nor_back_goes_unseen(tmp_path: Path, first: Exchange) -> None:
    toy = bench(tmp_path / "run")
    toy.exchange = first
    toy.run(stop_after=1)
    toy.exchange = Exchange(TrafficSettings(up="float16")) if first == PLAIN else PLAIN
    with pytest.raises(CheckpointError, match="traffic"):
        toy.run()


def test_other_rules_do_not_go_on_from_these_checkpoints(tmp_path: Path) -> None:
    import torch

    toy = bench(tmp_path / "run")
    toy.run(stop_after=1)
    toy.dtype = torch.float64
    with pytest.raises(CheckpointError, match="other rules"):
        toy.run()


@pytest.mark.parametrize(
    ("kind", "shared", "private"),
    [("local-only", "lora", (LORA_A, LORA_B)), ("fedavg", ("memory", "*.lora_B"), (LORA_A,))],
)
def test_private_factors_of_an_older_checkpoint_go_on_with_the_clients_rank(
    kind: str, shared: Any, private: tuple[str, ...], tmp_path: Path
) -> None:
    """Every client once began with the server's rank of what is private to it."""
    toy = Bench(
        tmp_path / "r",
        algorithm=ALGORITHMS[kind](own_settings(kind), shared),
        settings=FederationSettings(lora_ranks=("ada=1",)),
        training=TrainingSettings(rounds=3, local_steps=2),
        lora=True,
    )
    toy.run(stop_after=2)
    folder = toy.path / "checkpoints"
    newest = checkpoint_module.load_newest(folder)
    assert newest is not None
    bob = newest.client_states["bob"]
    factors = [name for name in bob if name.endswith(private)]
    assert len(factors) == 3 * len(private) and bob[f"private/{LORA_A}"].shape[0] == 2  # each with two moments
    old = {**newest.client_states, "ada": newest.client_states["ada"] | {name: bob[name] for name in factors}}
    checkpoint_module.save_round(folder, 2, newest.params, newest.server_state, old, newest.state, keep=3)
    toy.events.clear()
    transport = toy.transport()
    toy.run(transport, stop_after=2)  # only restored
    cut = transport.states()["ada"]
    for name in factors:
        expected = bob[name][:1] if name.endswith(LORA_A) else bob[name][:, :1]
        assert torch.equal(cut[name], expected)
    assert equal(transport.states()["bob"], bob)
    notes = [event["text"] for event in toy.events if event["event"] == "note"]
    assert len([text for text in notes if f'of client "ada", {len(private)} private LoRA' in text]) == 1
    toy.events.clear()
    toy.run(transport := toy.transport())
    assert transport.states()["ada"][f"private/{LORA_A}"].shape[0] == 1
    assert all(client["status"] == "ok" for row in toy.rows() for client in row["clients"])
    toy.events.clear()
    toy.run(toy.transport())
    assert not [event for event in toy.events if "private LoRA" in event.get("text", "")]


def test_a_run_folder_may_move(tmp_path: Path, uninterrupted: Any) -> None:
    toy = bench(tmp_path / "run")
    toy.run(validate_round=score, stop_after=2)
    shutil.move(toy.path, tmp_path / "moved")
    toy.path = tmp_path / "moved"
    # The bytes of the messages differ by the name, the rules do not.
    got = resumed(toy)
    assert equal(got[0], uninterrupted[0])
    assert equal(got[1], uninterrupted[1])


def test_more_rounds_go_on_where_the_schedule_is_constant(tmp_path: Path) -> None:
    constant = TRAINING.model_copy(update={"schedule": "constant"})
    whole, parts = bench(tmp_path / "a"), bench(tmp_path / "b")
    whole.training, parts.training = constant, constant.model_copy(update={"rounds": 2})
    expected = whole.run()
    parts.run()
    parts.training = constant
    assert equal(parts.run(), expected)


def test_fewer_rounds_than_were_done_are_refused_and_more_go_on(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run")
    toy.training = TRAINING.model_copy(update={"schedule": "constant"})
    toy.run(stop_after=3)
    toy.training = toy.training.model_copy(update={"rounds": 2})
    with pytest.raises(CheckpointError, match=r"have 3 rounds, and training\.rounds = 2: set it to at least 3"):
        toy.run()
    toy.training = toy.training.model_copy(update={"rounds": 5})
    toy.run()
    assert [row["round"] for row in toy.rows()] == [1, 2, 3, 4, 5]


def test_rows_that_are_missing_are_told_and_change_nothing_else(tmp_path: Path, uninterrupted: Any) -> None:
    toy = bench(tmp_path / "run")
    toy.run(validate_round=score, stop_after=3)
    rows = toy.path / "rounds.jsonl"
    rows.write_bytes(rows.read_bytes().splitlines(keepends=True)[0] + b'{"round": 2, "torn')
    toy.events.clear()
    params, tensors, best, _ = resumed(toy)
    assert equal(params, uninterrupted[0]) and equal(tensors, uninterrupted[1]) and best == uninterrupted[2]
    assert [row["round"] for row in toy.rows()] == [1, 4]
    assert [e["text"] for e in toy.events if e["event"] == "note"] == ["2 of 3 rounds are missing in rounds.jsonl"]


def test_without_any_checkpoint_the_rounds_begin_again_and_it_is_told(tmp_path: Path, uninterrupted: Any) -> None:
    toy = bench(tmp_path / "run")
    toy.run(validate_round=score, stop_after=2)
    shutil.rmtree(toy.path / "checkpoints")
    toy.events.clear()
    assert same(resumed(toy), uninterrupted)
    assert toy.events[0]["text"] == "no checkpoint is left, so the rounds begin again with the first"
