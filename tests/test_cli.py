from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fednl import cli
from fednl.errors import BackboneError, DataError, Interrupted

GOLDEN = Path(__file__).parent / "golden"
VERBS = ["", "models", "models get", "config", "partition", "train", "eval", "report", "reproduce", "lm-eval"]


def fednl(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Runs the command line in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as left:
        cli.main(list(words))
    out, err = capfd.readouterr()
    return int(left.value.code or 0), out, err


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the training module that records its calls."""
    module = types.ModuleType("fednl.training")
    calls: list[tuple[Any, ...]] = []

    def train(config: Any, path: Path, on_event: Callable[[dict[str, Any]], None]) -> None:
        calls.append(("train", config, path))
        on_event({"event": "phase", "text": "loading"})
        (path / "config.json").write_text('{"format": 1}')

    module.calls = calls  # type: ignore[attr-defined]
    module.train = train  # type: ignore[attr-defined]
    module.resume = lambda path, on_event: calls.append(("resume", path))  # type: ignore[attr-defined]
    module.evaluate = lambda path, task, on_event, sets: calls.append(("evaluate", path, task, sets))  # type: ignore[attr-defined]
    module.partition_rows = lambda config, on_event: [{"client": "law", "n": 3}, {"client": "med", "n": 0}]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fednl.training", module)
    monkeypatch.setattr("fednl.training", module, raising=False)
    return module


@pytest.fixture
def settings(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(f'[run]\nout = "{(tmp_path / "runs").as_posix()}"\n')
    return str(path)


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_what_it_was(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = fednl(capfd, *verb.split(), "--help")
    golden = GOLDEN / f"help-{verb.replace(' ', '-') or 'fednl'}.txt"
    if os.environ.get("FEDNL_WRITE_GOLDEN"):
        golden.write_text(out)
    assert (code, err) == (0, "")
    assert out == golden.read_text(), "if the new help is right: FEDNL_WRITE_GOLDEN=1 pytest tests/test_cli.py"


def test_every_verb_shows_an_example_that_parses(capfd: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS[2:]:
        _, out, _ = fednl(capfd, *verb.split(), "--help")
        examples = re.findall(r"^ +fednl (.*)$", out, re.MULTILINE)
        assert examples and all(example.startswith(verb) for example in examples), verb


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--version"], 0, "fednl 0."),
        (["trian"], 2, "Did you mean 'train'?"),
        (["train", "--sett", "x"], 2, "Did you mean '--set'?"),
        (["config"], 2, "Missing argument 'FILE'"),
        (["config", "nothing.toml"], 2, "there is no settings file nothing.toml"),
        (["train"], 2, "settings FILE or --resume RUN"),
        (["train", "x.toml", "--resume", "y"], 2, "settings FILE or --resume RUN"),
        (["train", "--resume", "y", "--set", "run.seed=1"], 2, "leave --set and --out away"),
        (["train", "--resume", "nowhere"], 2, "no run folder nowhere"),
        (["reproduce", "neddles"], 2, 'no table "neddles" to reproduce; the tables are: mmlu, needles'),
        (["reproduce", "needles", "--scale", "large"], 2, "the scales of needles are: tiny, small, paper"),
        (["reproduce", "needles", "--lengths", "1k"], 2, "--lengths 1k: write prompt tokens"),
        (
            ["reproduce", "needles", "--facts", "-1"],
            2,
            "--facts -1: write facts a prompt with commas between, for example 4,8",
        ),
    ],
)
def test_exit_codes(capfd: pytest.CaptureFixture[str], words: list[str], code: int, says: str) -> None:
    left, out, err = fednl(capfd, *words)
    assert left == code
    assert says in (out if code == 0 else err)
    assert "Traceback" not in err
    assert code == 0 or out == ""


def test_no_arguments_teach(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = fednl(capfd)
    assert code == 2
    assert "A first run" in out + err


def test_config_prints_a_settings_file(capfd: pytest.CaptureFixture[str], settings: str, tmp_path: Path) -> None:
    code, out, err = fednl(capfd, "config", settings, "--set", "training.rounds=2", "--set", "run.seed=5")
    assert (code, err) == (0, "")
    (tmp_path / "printed.toml").write_text(out)
    assert fednl(capfd, "config", str(tmp_path / "printed.toml")) == (0, out, "")
    assert "rounds = 2\n" in out and "seed = 5\n" in out


def test_a_wrong_setting_leaves_before_anything_loads(
    capfd: pytest.CaptureFixture[str], settings: str, training: types.ModuleType
) -> None:
    code, out, err = fednl(capfd, "train", settings, "--set", "memory.rnk=3")
    assert (code, out) == (2, "")
    assert err == 'Error: --set: unknown key "rnk" in [memory]; did you mean "rank"?\n'
    assert training.calls == []


def test_train_prints_the_folder(
    capfd: pytest.CaptureFixture[str], settings: str, training: types.ModuleType, tmp_path: Path
) -> None:
    out_folder = tmp_path / "mine"
    code, out, err = fednl(capfd, "train", settings, "--out", str(out_folder), "--set", "run.seed=3")
    assert (code, out) == (0, f"{out_folder}\n")
    assert "loading" in err and f"fednl report {out_folder}" in err
    (call,) = training.calls
    assert call[0] == "train" and call[1].run.seed == 3 and call[2] == out_folder


def test_train_and_eval_leave_the_report_in_the_run(
    capfd: pytest.CaptureFixture[str], settings: str, training: types.ModuleType, tmp_path: Path
) -> None:
    run = tmp_path / "mine"
    assert fednl(capfd, "train", settings, "--out", str(run))[0] == 0
    first = (run / "report.md").read_text()
    assert first.startswith("# mine\n")
    (run / "report.md").unlink()
    code, out, _ = fednl(capfd, "eval", str(run))
    assert (code, out) == (0, first + "\n") and (run / "report.md").read_text() == first


def test_a_folder_that_is_taken_is_told_before_anything_loads(
    capfd: pytest.CaptureFixture[str], settings: str, training: types.ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").write_text("x")
    code, out, err = fednl(capfd, "train", settings, "--out", str(tmp_path / "run"))
    assert (code, out) == (2, "") and "already exists: name a new folder" in err
    assert training.calls == []


def test_train_without_out_makes_a_new_folder_each_time(
    capfd: pytest.CaptureFixture[str], settings: str, training: types.ModuleType, tmp_path: Path
) -> None:
    folders = {fednl(capfd, "train", settings)[1].strip() for _ in range(2)}
    assert len(folders) == 2
    assert all(Path(folder).parent == tmp_path / "runs" and "mine" in folder for folder in folders)


def test_resume_and_eval_pass_the_folder_on(
    capfd: pytest.CaptureFixture[str],
    training: types.ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    tables = types.ModuleType("fednl.report.tables")
    tables.report = lambda paths: f"tables of {len(paths)}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fednl.report.tables", tables)
    assert fednl(capfd, "train", "--resume", str(tmp_path))[:2] == (0, f"{tmp_path}\n")
    assert fednl(capfd, "eval", str(tmp_path), "--task", "needles", "--set", "data.tokens=640")[:2] == (
        0,
        "tables of 1\n",
    )
    assert fednl(capfd, "report", str(tmp_path), str(tmp_path))[:2] == (0, "tables of 2\n")
    assert training.calls == [("resume", tmp_path), ("evaluate", tmp_path, "needles", ["data.tokens=640"])]


def test_partition_prints_a_table(capfd: pytest.CaptureFixture[str], settings: str, training: types.ModuleType) -> None:
    code, out, _ = fednl(capfd, "partition", settings)
    assert (code, out) == (0, "| client |   n |\n|--------|----:|\n| law    |   3 |\n| med    |   0 |\n")


@pytest.mark.parametrize("error", [DataError("the file is empty."), BackboneError("no attention found.")])
def test_a_user_error_is_one_line(
    capfd: pytest.CaptureFixture[str], settings: str, training: types.ModuleType, error: Exception
) -> None:
    def fails(*_: Any) -> None:
        raise error

    training.train = fails  # type: ignore[attr-defined]
    code, out, err = fednl(capfd, "train", settings)
    assert (code, out, err) == (1, "", f"Error: {error}\n")


def test_a_bug_keeps_its_traceback(settings: str, training: types.ModuleType) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    training.train = fails  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", settings])


@pytest.mark.parametrize("saved", [False, True])
def test_ctrl_c_names_the_way_back(
    capfd: pytest.CaptureFixture[str], settings: str, training: types.ModuleType, tmp_path: Path, saved: bool
) -> None:
    def interrupted(config: Any, path: Path, on_event: Any) -> None:
        if saved:
            (path / "config.json").write_text("{}")
        raise KeyboardInterrupt

    training.train = interrupted  # type: ignore[attr-defined]
    run = tmp_path / "run"
    code, out, err = fednl(capfd, "train", settings, "--out", str(run))
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert (f"fednl train --resume {run}" in err) == saved


def test_an_interruption_told_by_the_loop_is_passed_on(
    capfd: pytest.CaptureFixture[str], settings: str, training: types.ModuleType
) -> None:
    def interrupted(*_: Any) -> None:
        raise Interrupted("stopped after round 2; continue with: fednl train --resume x")

    training.train = interrupted  # type: ignore[attr-defined]
    assert fednl(capfd, "train", settings)[2] == "stopped after round 2; continue with: fednl train --resume x\n"


def test_ctrl_c_elsewhere_is_one_line(
    capfd: pytest.CaptureFixture[str], training: types.ModuleType, tmp_path: Path
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    training.evaluate = interrupted  # type: ignore[attr-defined]
    (tmp_path / "config.json").write_text("{}")
    assert fednl(capfd, "eval", str(tmp_path)) == (1, "", "Interrupted.\n")


def test_the_installed_command_answers() -> None:
    command = [sys.executable, "-m", "fednl", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("fednl ") and done.stderr == ""
