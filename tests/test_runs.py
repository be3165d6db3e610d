from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fednl.runs
from fednl.errors import CheckpointError, FednlError, SettingsError
from fednl.runs import Run, fresh_path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path, "demo")


def test_two_runs_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fednl.runs.time, "strftime", lambda _: "20260101-000000")
    paths = [Run.create(tmp_path, "demo").path for _ in range(3)]
    assert [path.name for path in paths] == [f"20260101-000000-demo{end}" for end in ("", "-2", "-3")]


def test_a_name_cannot_leave_the_folder_of_runs(tmp_path: Path) -> None:
    assert fresh_path(tmp_path, "../../x y/z").parent == tmp_path
    assert fresh_path(tmp_path, "..").name.endswith("-run")


def test_a_named_folder_must_be_free(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert Run.at(tmp_path / "empty").path.is_dir()
    assert Run.at(tmp_path / "new" / "deep").path.is_dir()
    (tmp_path / "empty" / "something").write_text("x")
    with pytest.raises(SettingsError, match="--resume"):
        Run.at(tmp_path / "empty")
    with pytest.raises(SettingsError, match="already exists"):
        Run.at(tmp_path / "empty" / "something")


def test_only_a_run_opens_as_a_run(tmp_path: Path, run: Run) -> None:
    with pytest.raises(SettingsError, match="no run folder"):
        Run.open(tmp_path / "missing")
    with pytest.raises(SettingsError, match=r"config\.json"):
        Run.open(run.path)
    run.write_json("config.json", {})
    assert Run.open(run.path) == run


def test_json_comes_back_and_carries_its_format(run: Run) -> None:
    value = {"a": 1, "deep": {"ü": [1.5, None, "x"]}}
    run.write_json("results/needles.json", value)
    assert run.read_json("results/needles.json") == value
    assert json.loads((run.path / "results/needles.json").read_text())["format"] == 1


def test_no_number_that_is_not_finite_is_written(run: Run) -> None:
    value = {"loss": math.nan, "rows": [{"x": math.inf, "y": 2.0}, math.nan]}
    run.write_json("a.json", value)
    assert run.read_json("a.json") == {"rows": [{"y": 2.0}, None]}
    run.append_jsonl("rounds.jsonl", {"round": 1, "loss": math.nan})
    assert run.read_jsonl("rounds.jsonl") == [{"round": 1}]
    assert math.isnan(value["loss"])  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["{", "[1]", '{"format": 2}', '{"a": 1}'])
def test_a_damaged_or_foreign_file_is_refused(run: Run, content: str) -> None:
    (run.path / "x.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"x\.json"):
        run.read_json("x.json")


def test_a_missing_file_is_told(run: Run) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.json"):
        run.read_json("nothing.json")
    assert run.read_jsonl("nothing.jsonl") == []


def test_a_failed_write_leaves_the_old_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_json("state.json", {"round": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FednlError, match="No space left on device"):
        run.write_json("state.json", {"round": 2})
    assert run.read_json("state.json") == {"round": 1}
    assert [path.name for path in run.path.iterdir()] == ["state.json"]


def test_names_stay_inside(run: Run) -> None:
    for name in ("../x.json", "/elsewhere/x.json", "a/../../x.json"):
        with pytest.raises(ValueError, match="leave the run folder"):
            run.write_json(name, {})
    assert run.folder("a/b").is_dir()


@settings(max_examples=40)
@given(rows=st.lists(st.dictionaries(st.text(max_size=3), st.integers()), max_size=5), cut=st.integers(0, 200))
def test_rows_survive_a_kill_at_any_byte(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, int]], cut: int
) -> None:
    run = Run.create(tmp_path_factory.mktemp("runs"))
    for row in rows:
        run.append_jsonl("rounds.jsonl", row)
    path = run.path / "rounds.jsonl"
    whole = path.read_bytes() if rows else b""
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    assert run.read_jsonl("rounds.jsonl") == rows[:kept]
    run.append_jsonl("rounds.jsonl", {"new": 1})
    assert run.read_jsonl("rounds.jsonl") == [*rows[:kept], {"new": 1}]


def test_a_damaged_row_in_the_middle_is_no_torn_end(run: Run) -> None:
    (run.path / "rounds.jsonl").write_text('{"round": 1}\n{"rou\n{"round": 3}\n')
    with pytest.raises(CheckpointError, match="line 2"):
        run.read_jsonl("rounds.jsonl")


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
def test_a_resumed_run_drops_later_rows(run: Run, keep: int) -> None:
    for number in range(3):
        run.append_jsonl("rounds.jsonl", {"round": number})
    assert run.truncate_jsonl("rounds.jsonl", keep) == min(keep, 3)
    assert [row["round"] for row in run.read_jsonl("rounds.jsonl")] == list(range(3))[:keep]
    run.truncate_jsonl("absent.jsonl", keep)
    assert not (run.path / "absent.jsonl").exists()


def test_c23_a_run_belongs_to_one_process_at_a_time_and_a_second_is_told_so_at_once(run: Run) -> None:
    code = f"from pathlib import Path; from fednl.runs import Run\nwith Run(Path({str(run.path)!r})).locked(): pass"
    command = [sys.executable, "-c", code]
    with run.locked():
        with (
            pytest.raises(FednlError, match=r"another process is at work on .*: wait for it, or stop it"),
            Run(run.path).locked(),
        ):
            pass
        assert b"another process is at work" in subprocess.run(command, capture_output=True).stderr
    subprocess.run(command, check=True)


def test_a_discarded_run_is_gone_also_while_it_is_locked(run: Run) -> None:
    with run.locked():
        run.write_json("config.json", {})
        run.discard()
    assert not run.path.exists()


def test_a_row_that_is_no_object_is_damage(run: Run) -> None:
    (run.path / "rounds.jsonl").write_text('{"round": 1}\n3\n')
    with pytest.raises(CheckpointError, match="line 2"):
        run.read_jsonl("rounds.jsonl")


def test_another_programs_file_is_not_called_another_versions(run: Run) -> None:
    for content, told in (('{"model_type": "llama"}', "fednl did not write it"), ('{"format": 9}', "another version")):
        (run.path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=told):
            run.read_json("config.json")
