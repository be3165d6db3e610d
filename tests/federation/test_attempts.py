"""A run that goes back behind rounds that failed counts the attempt and what it spent, whatever is lost in between."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federation_toys import Bench, Tampered

from fednl.errors import CheckpointError, FednlError, Interrupted
from fednl.federation.accounting import Spent
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.attempts import NAME, Asked, taken_back
from fednl.federation.checkpoint import load_newest, read_tensors, round_of
from fednl.federation.exchange import PLAIN, CombineSettings, Exchange, PrivacySettings
from fednl.federation.params import Params, equal
from fednl.federation.record import Validation
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.transport import Reply
from fednl.runs import Run


class Crash(BaseException):
    """The process is killed."""


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epsilon is the number of rounds that it is of, so that a test needs no accountant; secrets are known."""
    count: Callable[[Iterable[Any], float], float] = lambda releases, delta: float(sum(one[2] for one in releases))  # noqa: E731
    monkeypatch.setattr("fednl.federation.accounting.epsilon_of", count)
    drawn = itertools.count(1)  # every secret another one, and the same in every test
    monkeypatch.setattr("fednl.federation.accounting.secrets.randbits", lambda bits: next(drawn))


def bench(path: Path, mode: Any = "none", keep: int = 1, epsilon: float = 0.0) -> Bench:
    """Six rounds, of which two that fail in a row end the run."""
    toy = Bench(path, algorithm=FedAvg(shared="memory"), training=TrainingSettings(rounds=6, local_steps=1))
    toy.settings = FederationSettings(clients_per_round=3, quorum=2, max_failed_rounds=2, keep_checkpoints=keep)
    if mode != "none":
        privacy = PrivacySettings(mode=mode, noise_multiplier=1.0, noise_seed=1, epsilon=epsilon)
        toy.exchange = Exchange(combine=CombineSettings(weights="uniform"), privacy=privacy)
    return toy


def fail_from(toy: Bench, first: int, **named: Any) -> None:
    """Ends the run as all replies of rounds from one on are lost."""
    transport = toy.transport()

    def change(replies: list[Reply]) -> list[Reply]:
        lost = [Reply(reply.client, status="lost", reason="lost") for reply in replies]
        return lost if transport.sent[-1].round >= first else replies

    transport.change = change
    with pytest.raises(FednlError, match=r"rounds in a row failed|rounds changed the rules"):
        toy.run(transport, **named)


def end_of(toy: Bench, transport: Tampered | None = None, **named: Any) -> tuple[Params, list[Any]]:
    params, rows = toy.run(transport, **named), toy.rows()
    for row in rows:
        for each in (row, *row["clients"]):
            for name in ("seconds_s", "cpu_s", "up_bytes", "up_container_bytes"):
                each.pop(name, None)
    return params, rows


def attempt_of(toy: Bench) -> int:
    newest = load_newest(toy.path / "checkpoints")
    assert newest is not None
    return int(newest.state["attempt"])


def damage(toy: Bench, round: int) -> None:
    path = toy.path / "checkpoints" / f"round-{round}" / "params.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(("first", "keep", "kind"), [(1, 2, Crash), (3, 2, Crash), (3, 1, KeyboardInterrupt)])
def test_a_crash_at_any_moment_of_going_back_leads_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, keep: int, kind: type[BaseException]
) -> None:
    failed = bench(tmp_path / "failed" / "run", "central", keep)
    # A secret of its own and a clip that moves: both are in checkpoints that go.
    own = PrivacySettings(mode="central", noise_multiplier=1.0, adaptive_clip=True)
    failed.exchange = replace(failed.exchange, privacy=own)
    fail_from(failed, first)
    calls, at = 0, 0
    real = {"replace": os.replace, "rmtree": shutil.rmtree}

    def crashing(name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise kind
            found = real[name](*args, **named)
            calls += 1
            if calls == at:
                raise kind
            return found

        return call

    expected: Any = None
    for at in range(200):
        toy = replace(failed, path=tmp_path / str(at) / "run", events=[])
        shutil.copytree(failed.path, toy.path)
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crashing("replace"))
            patch.setattr(shutil, "rmtree", crashing("rmtree"))
            try:
                toy.run(stop_after=first)  # the first round that is done again, and all before it
            except (Crash, KeyboardInterrupt, Interrupted):
                pass
            else:
                if at:
                    break
        found = end_of(toy, stop_after=first)
        expected = expected or (found, attempt_of(toy))
        assert equal(found[0], expected[0][0]) and (found[1], attempt_of(toy)) == (expected[0][1], 1), f"call {at}"
    assert at > 10 and found[1][-1]["metrics"]["epsilon"] == first + 2


@pytest.mark.parametrize("first", [1, 4])
def test_ctrl_c_in_the_round_that_is_done_again_changes_nothing(tmp_path: Path, first: int) -> None:
    toy = bench(tmp_path / "one" / "run", "central")
    toy.exchange = replace(
        toy.exchange, privacy=PrivacySettings(mode="central", noise_multiplier=1.0, adaptive_clip=True)
    )
    fail_from(toy, first)
    other = replace(toy, path=tmp_path / "other" / "run", events=[])
    shutil.copytree(toy.path, other.path)

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round-start" and event["round"] == first:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        other.run(on_event=stop)
    params, rows = end_of(toy)
    again, theirs = end_of(other)
    assert equal(params, again) and [row["metrics"]["clip"] for row in rows] == [
        row["metrics"]["clip"] for row in theirs
    ]
    assert [[one["name"] for one in row["clients"]] for row in rows] == [
        [one["name"] for one in row["clients"]] for row in theirs
    ]


def test_where_the_round_to_go_back_to_is_damaged_nothing_is_thrown_away(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run")
    fail_from(toy, 4)
    Asked(4, (4,)).write(Run(toy.path))  # as a crash leaves it, before anything is taken back
    damage(toy, 3)
    rows = toy.rows()
    with pytest.raises(CheckpointError, match=r"is damaged \(round-3\): restore one, or start anew"):
        toy.run()
    assert toy.rows() == rows and (toy.path / "checkpoints" / "round-3").is_dir()


@pytest.mark.parametrize("mode", ["none", "central", "local"])
def test_a_damaged_checkpoint_undoes_neither_the_attempt_nor_what_it_spent(tmp_path: Path, mode: Any) -> None:
    toy = bench(tmp_path / "run", mode, keep=2)
    toy.settings = toy.settings.model_copy(update={"clients_per_round": 0})
    fail_from(toy, 4)
    toy.run(stop_after=4)
    damage(toy, 4)
    transport = toy.transport()
    _, rows = end_of(toy, transport)
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6] and all(row["updated"] for row in rows)
    # Without noise the same is asked again. With it, that is another question, as nobody knows who answered the first.
    assert {message.attempt for message in transport.sent} == {1 if mode == "none" else 2}
    if mode != "none":  # rounds 1 to 3; 4 and 5, which failed; 4, which is lost; 4 to 6
        assert rows[-1]["metrics"]["epsilon"] == 3 + 2 + 1 + 3


def test_what_a_crash_cuts_short_is_counted_once(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run", "local")
    toy.settings = toy.settings.model_copy(update={"clients_per_round": 0})

    def kill(event: Any) -> None:
        if (event["event"], event.get("round")) == ("client-done", 3):
            raise Crash

    for _ in range(2):
        with pytest.raises(Crash):
            toy.run(on_event=kill)
    assert Asked.read(toy.run_folder).question == (0, 3)
    assert end_of(toy)[1][-1]["metrics"]["epsilon"] == 6


def test_a_run_whose_checkpoints_are_gone_still_counts_what_it_asked(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run", "central")
    toy.run(stop_after=2)
    shutil.rmtree(toy.path / "checkpoints")
    assert end_of(toy)[1][-1]["metrics"]["epsilon"] == 2 + 6
    assert attempt_of(toy) == 1


def test_a_folder_of_before_goes_on_without_the_file_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run", "local")
    fail_from(toy, 3)
    (toy.path / NAME).unlink()
    toy.run(stop_after=3)
    assert attempt_of(toy) == 1
    (toy.path / NAME).write_text('{"format": 1, "round": 2}')
    with pytest.raises(CheckpointError, match=r"attempts\.json is damaged: restore it from a copy"):
        toy.run()


def test_the_last_row_says_what_is_spent_where_no_round_is_done_after_going_back(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run", "local", epsilon=5.5)
    toy.settings = toy.settings.model_copy(update={"clients_per_round": 0})
    fail_from(toy, 4)
    for _ in range(2):
        toy.run()
        rows = toy.rows()
        assert [row["round"] for row in rows] == [1, 2, 3]
        assert [row["metrics"]["epsilon"] for row in rows] == [1, 2, 5]
        assert round_of(toy.path / "final/params.safetensors") == 3
    assert "more than the budget of 5.5" in toy.events[-1]["text"]


@pytest.mark.parametrize("first", [1, 4])
def test_the_best_rules_are_never_of_a_round_that_was_taken_back(tmp_path: Path, first: int) -> None:
    toy = bench(tmp_path / "run")
    losses = [0.9, 0.4, 0.5, 0.3, 0.2, 0.1]
    fail_from(toy, first, validate_round=lambda round, params: Validation({"loss": losses[round - 1]}))
    best = toy.path / "best/params.safetensors"
    assert round_of(best) >= first
    toy.run(stop_after=0)
    if first == 1:
        assert not best.exists()
        return
    whole = bench(tmp_path / "whole" / "run")
    expected = whole.run(stop_after=2)
    rules, header = read_tensors(best)
    assert equal(rules, expected) and header == {"round": 2}
    toy.run(stop_after=4, validate_round=lambda round, params: Validation({"loss": 0.45}))
    assert round_of(best) == 2


def test_best_rules_whose_checkpoint_is_gone_are_left_out_until_there_are_better_ones(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run")
    losses = [0.9, 0.4, 0.5, 0.3, 0.2, 0.1]
    fail_from(toy, 4, validate_round=lambda round, params: Validation({"loss": losses[round - 1]}))
    shutil.rmtree(toy.path / "checkpoints" / "round-2", ignore_errors=True)
    toy.run(stop_after=4, validate_round=lambda round, params: Validation({"loss": 0.45}))
    assert round_of(toy.path / "best/params.safetensors") == 4


def test_a_round_is_taken_back_by_any_later_attempt_that_began_with_it_or_before() -> None:
    begun = (5, 9)
    assert [taken_back(round, 0, begun) for round in (4, 5, 8, 9)] == [False, True, True, True]
    assert [taken_back(round, 1, begun) for round in (4, 5, 8, 9)] == [False, False, False, True]
    assert not taken_back(9, 2, begun) and not taken_back(9, 0, ())


def test_of_two_counts_the_larger_one_is_taken() -> None:
    spent = Spent(7, 1.0, ((1.0, 0.5, 3),), {"ada": 2, "bob": 1})
    noted = Spent(8, 2.0, ((1.0, 0.5, 4),), {"bob": 3, "cyd": 1}).to_dict()
    assert spent.at_least(noted) == Spent(7, 1.0, ((1.0, 0.5, 4),), {"ada": 2, "bob": 3, "cyd": 1})
    assert spent.at_least(None) == spent


def test_what_was_noted_is_read_again(tmp_path: Path) -> None:
    toy = Bench(tmp_path / "run", exchange=PLAIN)
    assert Asked.read(toy.run_folder) == Asked()
    counts = Spent(7, 1.0, ((1.0, 0.5, 3),), {"ada": 2}).to_dict()
    asked = Asked(3, (2, 3), None, counts)
    asked.write(toy.run_folder)
    assert Asked.read(toy.run_folder) == asked


def test_once_a_run_went_back_nothing_on_disk_is_of_a_later_round(tmp_path: Path) -> None:
    toy = bench(tmp_path / "run", keep=3)
    fail_from(toy, 3)

    def kill(event: Any) -> None:
        if event["event"] == "round-start":
            raise Crash

    with pytest.raises(Crash):
        toy.run(on_event=kill)
    assert round_of(toy.path / "final/params.safetensors") == 2 and len(toy.rows()) == 2
    assert {path.name for path in (toy.path / "checkpoints").iterdir()} <= {"round-1", "round-2"}
    assert Asked.read(toy.run_folder).question == (1, 3)
