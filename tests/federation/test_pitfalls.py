"""What federated runs of others broke on, one test an id: rows B, C and G13, as far as they concern rounds."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_toys import GATE, PROJECTION, SIZES, WRITE, Bench, forge, start_params
from pydantic import ValidationError

from fednl.config import Config
from fednl.errors import DataError, FednlError, MessageError, SettingsError
from fednl.federation.algorithms import ALGORITHMS
from fednl.federation.checkpoint import load_round, read_tensors
from fednl.federation.exchange import PLAIN, CombineSettings, Exchange, PrivacySettings, TrafficSettings
from fednl.federation.local import LocalPlan, learning_rate
from fednl.federation.loop import sample_clients
from fednl.federation.message import Message
from fednl.federation.params import equal, finite, personal
from fednl.federation.record import Validation
from fednl.federation.settings import PACES, FederationSettings, TrainingSettings
from fednl.federation.transport import InProcessTransport, Reply
from fednl.federation.validate import check_update

UNIFORM = CombineSettings(weights="uniform")
ONE_ROUND = TrainingSettings(rounds=1, local_steps=2)


def test_b01_another_prefix_or_a_missing_key_is_refused_not_skipped() -> None:
    expected = start_params()
    prefixed = {f"base_model.model.{name}": tensor for name, tensor in expected.items()}
    for params, code in ((prefixed, "unknown-name"), ({WRITE: expected[WRITE]}, "missing-name")):
        with pytest.raises(MessageError) as caught:
            check_update(Message(params, num_examples=1, client="ada"), expected, 0, "ada")
        assert caught.value.code == code


@pytest.mark.parametrize("shared", ["all", "memory"])
def test_b02_gates_and_every_other_rule_train_travel_save_and_reload(tmp_path: Path, shared: str) -> None:
    toy = Bench(tmp_path / "run", algorithm=ALGORITHMS["fedavg"](shared=shared))
    transport = toy.transport()
    params = toy.run(transport)
    own = personal(params, transport.states()["cyd"])
    assert all(not torch.equal(own[name], tensor) for name, tensor in start_params().items())
    reloaded, _ = read_tensors(toy.path / "final/params.safetensors")
    assert equal(reloaded, params)
    checkpoint = load_round(toy.path / "checkpoints", 3)
    assert equal(personal(reloaded, checkpoint.client_states["cyd"]), own)


def test_b13_a_validation_without_a_number_is_no_best_and_no_silent_zero(tmp_path: Path) -> None:
    losses = iter([float("nan"), 0.5, 0.4])
    toy = Bench(tmp_path / "run")
    toy.run(validate_round=lambda round, params: Validation.of_clients({"ada": 1.0, "bob": next(losses)}))
    metrics = [row["metrics"] for row in toy.rows()]
    assert [row.get("validation_loss") for row in metrics] == [None, 0.75, 0.7]
    assert [row.get("validation_loss_worst") for row in metrics] == [None, 1.0, 1.0]
    assert read_tensors(toy.path / "best/params.safetensors")[1] == {"round": 3}


def test_b14_a_kill_in_the_middle_of_a_round_resumes_from_the_round_checkpoint(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(event: Any) -> None:
        if event["event"] == "step" and event["round"] == 2:
            raise Killed

    toy, whole = Bench(tmp_path / "killed"), Bench(tmp_path / "whole")
    with pytest.raises(Killed):
        toy.run(on_event=kill)
    assert equal(toy.run(), whole.run())


def test_b17_the_schedule_follows_the_global_round_and_never_restarts() -> None:
    training = TrainingSettings(rounds=4, local_steps=5, schedule="cosine", warmup_steps=3)
    plans = [LocalPlan.of(training, round) for round in range(1, 5)]
    rates = [learning_rate(plan, step) for plan in plans for step in range(5)]
    peak = rates.index(max(rates))
    assert peak in (2, 3)
    assert all(a > b for a, b in zip(rates[peak + 1 :], rates[peak + 2 :], strict=False))
    assert len(set(rates[peak + 1 :])) == len(rates) - peak - 1


def test_c01_no_examples_anywhere_stops_before_round_one_or_keeps_the_rules_and_says_so(tmp_path: Path) -> None:
    toy = Bench(tmp_path / "known", sizes={"ada": 0, "bob": 0}, training=ONE_ROUND)
    with pytest.raises(DataError, match="None of the 2 clients"):
        toy.run()
    late = Bench(tmp_path / "unknown", sizes={"ada": 0, "bob": 0}, training=TrainingSettings(rounds=5, local_steps=1))
    with pytest.raises(FednlError, match="None of the 5 rounds changed the rules"):
        late.run(InProcessTransport(late.endpoint(), ["ada", "bob"]))
    assert equal(read_tensors(late.path / "final/params.safetensors")[0], start_params())
    assert [row["reason"] for row in late.rows()] == ["no client that was asked has examples"] * 5


def test_c01_a_round_that_draws_only_clients_without_examples_is_no_failure(tmp_path: Path) -> None:
    settings = FederationSettings(clients_per_round=1, max_failed_rounds=1)
    toy = Bench(tmp_path / "run", sizes={"ada": 0, "bob": 3, "cyd": 0}, settings=settings)
    toy.training = TrainingSettings(rounds=8, local_steps=1)
    toy.run()
    reasons = [row.get("reason", "") for row in toy.rows()]
    assert set(reasons) == {"", "no client that was asked has examples"}
    assert reasons[:2] != ["", ""], "the case is not trivial"


def test_c01_rounds_without_examples_between_failures_neither_count_nor_make_them_forgotten(tmp_path: Path) -> None:
    """One client has no examples, the other fails; drawn one at a time they alternate."""
    settings = FederationSettings(clients_per_round=1, max_failed_rounds=3, keep_checkpoints=1)
    one_step = TrainingSettings(rounds=12, local_steps=1)

    def toy(name: str) -> Bench:
        return Bench(tmp_path / name, sizes={"ada": 0, "bob": 3}, settings=settings, training=one_step)

    def broken(after: int) -> InProcessTransport:
        def endpoint(client: str, message: Message, *rest: Any) -> Any:
            if client == "bob" and message.round > after:
                raise OSError("disk")
            return failing.endpoint()(client, message, *rest)

        return InProcessTransport(endpoint, ["ada", "bob"])

    whole, failing = toy("whole"), toy("failing")
    whole.run(InProcessTransport(whole.endpoint(), ["ada", "bob"]))
    taught = [row["round"] for row in whole.rows() if row["updated"]]
    first = taught[0]
    with pytest.raises(FednlError, match=r"3 rounds in a row failed, the last as .*OSError"):
        failing.run(broken(first))
    fails = [row["round"] for row in failing.rows() if row.get("reason", "").startswith("0 valid")]
    assert fails == taught[1:4] and fails[-1] == len(failing.rows())
    assert fails[-1] - fails[0] > 2, "the case is not trivial: rounds without examples lie between"
    # What failed is taken back to before the first failure, though other rounds lie between; clients are drawn anew.
    failing.events.clear()
    failing.run(InProcessTransport(failing.endpoint(), ["ada", "bob"]))
    assert failing.events[0]["text"] == f"rounds {fails[0]} to {fails[-1]} changed nothing, so they are done again"
    drawn = [[client["name"] for client in row["clients"]] for row in failing.rows()]
    again = [sample_clients(["ada", "bob"], 1, failing.seed, n, attempt=1) for n in range(first + 1, 13)]
    assert drawn[first:] == again and len(drawn) == 12
    assert [row["updated"] for row in failing.rows()] == [names == ["bob"] for names in drawn]


def test_c01_a_floor_that_no_client_reaches_is_refused_or_said_at_the_end(tmp_path: Path) -> None:
    """Clients with examples that may not share are no clients without: their round has words of its own."""
    toy = Bench(tmp_path / "known", training=ONE_ROUND)
    toy.exchange = Exchange(privacy=PrivacySettings(min_examples=100))
    words = r"\[privacy\] min-examples = 100, but the largest of the 4 clients has 12 training examples, .*: lower it"
    with pytest.raises(SettingsError, match=words):
        toy.run()
    toy.exchange = Exchange(privacy=PrivacySettings(min_examples=10))
    by_task = {"early": {**SIZES, "cyd": 11}, "late": {**SIZES, "cyd": 1}}  # of both tasks together cyd has enough
    with pytest.raises(SettingsError, match=r'the 4 clients has 7 training examples of the task "late", so none would'):
        toy.run(by_task=by_task)
    assert not (toy.path / "rounds.jsonl").exists()
    toy.run(by_task={"early": by_task["early"]})
    toy.exchange = Exchange(privacy=PrivacySettings(min_examples=100))
    toy.path = tmp_path / "unknown"
    with pytest.raises(FednlError, match="None of the 1 rounds changed the rules"):
        toy.run(InProcessTransport(toy.endpoint(), list(SIZES)))
    assert toy.rows()[0]["reason"] == "no client that was asked has enough examples to share what it learns"
    assert {client["status"] for client in toy.rows()[0]["clients"]} == {"withheld"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_c02_one_bad_number_of_one_client_never_reaches_the_rules(tmp_path: Path, value: float) -> None:
    def spoil(replies: list[Reply]) -> list[Reply]:
        bad = {**start_params(), GATE: torch.tensor(value)}
        return [forge(reply, params=bad) if reply.client == "bob" else reply for reply in replies]

    toy = Bench(tmp_path / "run", training=ONE_ROUND)
    assert finite(toy.run(toy.transport(spoil)))
    assert toy.rows()[0]["refused"] == {"non-finite": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_c03_every_float_crosses_both_ways_with_its_dtype_and_bits(dtype: torch.dtype) -> None:
    params = {
        WRITE: torch.randn(5).to(dtype),
        GATE: torch.zeros((), dtype=dtype),
        PROJECTION: torch.empty(0, dtype=dtype),
    }
    there = Message.from_bytes(Message(params, num_examples=1).to_bytes())
    assert equal(there.params, params)


def test_c04_too_few_clients_end_in_a_sentence_with_the_numbers_not_in_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = FederationSettings(quorum=4, deadline_s=600.0, max_failed_rounds=1)
    toy = Bench(tmp_path / "run", settings=settings, training=ONE_ROUND)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("every client was heard or given up"))
    with pytest.raises(FednlError, match='3 valid replies are fewer than quorum = 4, first "dan" \\(late\\)'):
        toy.run(toy.transport(lambda replies: [reply for reply in replies if reply.client != "dan"]))


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), True, 1])
def test_c07_any_kind_of_number_is_a_metric_and_becomes_a_float(value: Any) -> None:
    there = Message.from_bytes(Message({}, metrics={"loss": value}).to_bytes())
    assert type(there.metrics["loss"]) is float
    assert there.metrics["loss"] == float(value)


def test_c08_the_mean_of_clients_metrics_and_each_one_are_there_without_asking(tmp_path: Path) -> None:
    toy = Bench(tmp_path / "run", training=ONE_ROUND)
    toy.run()
    row = toy.rows()[0]
    mean = sum(client["loss"] * client["num_examples"] for client in row["clients"]) / sum(SIZES.values())
    assert row["metrics"]["train_loss"] == pytest.approx(mean)


def test_c08_every_client_that_was_validated_keeps_its_numbers_and_the_worst_is_named(tmp_path: Path) -> None:
    losses = {"ada": 1.0, "bob": 4.0, "cyd": 3.0, "dan": 2.0}
    toy = Bench(tmp_path / "run", settings=FederationSettings(clients_per_round=2))
    toy.run(validate_round=lambda round, params: Validation.of_clients(losses, {"bob": [True, False]}))
    for row in toy.rows():
        found = {one["name"]: one["validation_loss"] for one in [*row["clients"], *row["not_asked"]]}
        assert found == losses and len(row["clients"]) == len(row["not_asked"]) == 2
        assert {one.get("validation_accuracy") for one in [*row["clients"], *row["not_asked"]]} == {0.5, None}
        assert row["validation_worst"] == "bob" and row["metrics"]["validation_loss_worst"] == 4.0
    # Who has no number is worse than any; all asked, nobody is left out.
    for bad in (float("nan"), float("inf")):
        assert Validation.of_clients({**losses, "cyd": bad}).worst == "cyd"
    whole = Bench(tmp_path / "whole", training=ONE_ROUND)
    whole.run(validate_round=lambda round, params: Validation.of_clients(losses))
    assert "not_asked" not in whole.rows()[0] and whole.rows()[0]["clients"][1]["validation_loss"] == 4.0


@pytest.mark.parametrize(
    ("kind", "settings", "exchange"),
    [
        ("fedavg", FederationSettings(), PLAIN),
        ("scaffold", FederationSettings(clients_per_round=2), PLAIN),
        ("fedavg", FederationSettings(lora_ranks=("a*=1",)), PLAIN),
        ("fedavg", FederationSettings(), Exchange(TrafficSettings(up="int8", down="float16", content="deltas"))),
        ("fedavg", FederationSettings(), Exchange(combine=UNIFORM, privacy=PrivacySettings(secure=True))),
    ],
)
def test_c09_the_size_of_messages_is_told_before_anything_is_sent(
    tmp_path: Path, kind: str, settings: FederationSettings, exchange: Exchange
) -> None:
    lora = bool(settings.lora_ranks)
    algorithm = ALGORITHMS[kind](shared=("all", "lora") if lora else "all")
    toy = Bench(tmp_path / "run", algorithm=algorithm, settings=settings, exchange=exchange, lora=lora)
    toy.training = ONE_ROUND
    toy.run()
    assert [event["event"] for event in toy.events[:2]] == ["note", "round-start"]
    told = toy.events[0]["text"]
    assert f"{settings.clients_per_round or 4} of 4 clients are asked" in told
    down, up = (float(number) * 1e6 for number in re.findall(r"([0-9.e-]+) MB", told))
    rows = toy.rows()[0]["clients"]
    metrics_bytes = 300
    if exchange.privacy.secure:  # keys and shares are a masked round's other messages
        assert 0 < down < min(row["down_bytes"] for row in rows) and 0 < up < min(row["up_bytes"] for row in rows)
        return
    assert down == pytest.approx(max(row["down_bytes"] for row in rows), rel=0.01)
    assert 0 <= max(row["up_bytes"] for row in rows) - up <= metrics_bytes


def test_c10_a_long_round_is_waited_for_and_there_is_one_deadline_to_set(tmp_path: Path) -> None:
    given: list[float | None] = []

    class Noted(InProcessTransport):
        def replies(self, deadline_s: float | None, on_progress: Any = None) -> Any:
            given.append(deadline_s)
            return super().replies(deadline_s, on_progress)

    toy = Bench(tmp_path / "run")
    toy.run(Noted(toy.endpoint(), SIZES))
    assert given == [None] * 3
    assert {name for name in FederationSettings.model_fields if name.endswith("_s")} == {"deadline_s", "warm_up_s"}


def test_c11_a_message_that_is_lost_for_ever_costs_one_deadline_not_the_run(tmp_path: Path) -> None:
    toy = Bench(tmp_path / "run", settings=FederationSettings(deadline_s=30.0))
    toy.run(toy.transport(lambda replies: replies[1:]))
    assert [row["clients"][0]["status"] for row in toy.rows()] == ["late"] * 3
    assert [row["updated"] for row in toy.rows()] == [True] * 3


def test_c13_the_first_round_of_a_sitting_has_a_warm_up_allowance_and_later_ones_have_not(tmp_path: Path) -> None:
    given: list[float | None] = []

    class Noted(InProcessTransport):
        def replies(self, deadline_s: float | None, on_progress: Any = None) -> Any:
            given.append(deadline_s)
            return super().replies(None, on_progress)

    toy = Bench(tmp_path / "run", settings=FederationSettings(deadline_s=2.0, warm_up_s=60.0))
    for stop_after in (2, None):
        toy.run(Noted(toy.endpoint(), SIZES), stop_after=stop_after)
    assert given == [62.0, 2.0, 62.0]


def test_g13_two_times_in_all_have_presets_and_nobody_must_set_one(tmp_path: Path) -> None:
    """A large model needs no tuning of timeouts: none by default, one word for both times otherwise."""
    keys = {
        f"{section}.{key}"
        for section, table in Config().to_dict().items()
        for key in table
        if key.endswith("-s") or "timeout" in key
    }
    assert keys == {"federation.deadline-s", "federation.warm-up-s"}
    plain = FederationSettings()
    assert plain.seconds_to_wait(first=True) is None and plain.seconds_to_wait(first=False) is None
    given: list[float | None] = []

    class Noted(InProcessTransport):
        def replies(self, deadline_s: float | None, on_progress: Any = None) -> Any:
            given.append(deadline_s)
            return super().replies(None, on_progress)

    for pace in PACES:
        toy = Bench(tmp_path / pace, settings=FederationSettings(pace=pace))  # type: ignore[arg-type]
        toy.run(Noted(toy.endpoint(), SIZES), stop_after=2)
    assert given == [2400.0, 600.0, 5 * 3600.0, 4 * 3600.0, 76 * 3600.0, 72 * 3600.0]
    with pytest.raises(
        ValidationError, match=r'pace = "hours" sets how long .*leave both out, or set pace = "patient"'
    ):
        FederationSettings(pace="hours", deadline_s=60.0)


def test_c14_the_first_failing_clients_reason_is_in_the_summary_and_its_private_words_are_not(tmp_path: Path) -> None:
    def endpoint(client: str, *rest: Any) -> Any:
        raise ValueError("patient Ada, born Byron")

    toy = Bench(tmp_path / "run", settings=FederationSettings(max_failed_rounds=2))
    with pytest.raises(FednlError, match=r'"ada" \(failed, ValueError, test_pitfalls.py:\d+\)') as caught:
        toy.run(InProcessTransport(endpoint, SIZES))
    assert "Byron" not in str(caught.value) + (toy.path / "rounds.jsonl").read_text()
    assert len(toy.rows()) == 2


def test_c17_one_client_at_a_time_unless_asked_otherwise() -> None:
    assert FederationSettings().parallel_clients == 1


def test_c18_rounds_need_neither_ray_nor_flower(tmp_path: Path) -> None:
    Bench(tmp_path / "run", training=ONE_ROUND).run()
    assert not {"ray", "flwr"} & set(sys.modules)
    needed = [line for line in requires("fednl") or [] if "extra ==" not in line]
    assert needed and not [line for line in needed if line.lower().startswith(("ray", "flwr"))]


def test_c21_two_replies_under_one_name_count_once(tmp_path: Path) -> None:
    toy, plain = Bench(tmp_path / "a", training=ONE_ROUND), Bench(tmp_path / "b", training=ONE_ROUND)
    params = toy.run(toy.transport(lambda replies: [*replies, replace(replies[2], client="ada"), replies[0]]))
    assert equal(params, plain.run())
    assert toy.rows()[0]["refused"] == {"unknown-client": 1, "duplicate": 1}


def test_c27_what_fights_other_packages_is_no_part_of_the_core() -> None:
    core = [line for line in requires("fednl") or [] if "extra ==" not in line]
    assert core and not [line for line in core if line.lower().startswith(("grpc", "protobuf", "ray", "flwr"))]
    assert not [line for line in core if "==" in line], "an exact pin lets nothing else be installed beside it"


def test_c29_nothing_is_installed_or_started_inside_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Popen", "run", "check_call"):
        monkeypatch.setattr(subprocess, name, lambda *rest, **named: pytest.fail("a round started a process"))
    loaded = {name.partition(".")[0] for name in sys.modules}
    Bench(tmp_path / "run").run()
    assert not {"pip", "uv", "ensurepip"} & ({name.partition(".")[0] for name in sys.modules} - loaded)


def test_c26_final_and_best_rules_are_there_by_default_and_names_do_not_collide(tmp_path: Path) -> None:
    losses = {1: 0.2, 2: 0.9, 3: 0.8, 4: 0.7, 5: 0.6}
    toy = Bench(
        tmp_path / "run", sizes={"a/b": 2, "A/b": 3, "a b": 4}, training=TrainingSettings(rounds=5, local_steps=1)
    )
    toy.run(validate_round=lambda round, params: Validation({"loss": losses[round]}))
    assert read_tensors(toy.path / "final/params.safetensors")[1] == {"round": 5}
    assert read_tensors(toy.path / "best/params.safetensors")[1] == {"round": 1}
    kept = sorted(path.name for path in (toy.path / "checkpoints").iterdir())
    assert kept == ["round-1", "round-4", "round-5"]  # the best round's, with every client's private part
    assert len(list((toy.path / "checkpoints/round-1").glob("client-*.safetensors"))) == 3
