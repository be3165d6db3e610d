"""What `--set` reaches in a table: never what makes a line what its name says, and nobody's folders on a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fednl import cli
from fednl.config import Config
from fednl.errors import FednlError, SettingsError
from fednl.reproduce import ablation, mmlu, needles, page, table_named, traffic
from fednl.reproduce.given import kept_own
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Method, Scale
from fednl.runs import Run


def configs(table: str, folder: Path, *given: str) -> dict[str, Config]:
    sitting = Sitting(table_named(table), "small", folder, given=given)
    return {method.name: sitting.config(method) for method in sitting.methods}


def test_another_window_is_for_all_but_the_lines_of_full_attention(tmp_path: Path) -> None:
    found = configs("needles", tmp_path, "memory.window-tokens=200", 'memory.layers="last:8"')
    windows = {name: config.memory.window_tokens for name, config in found.items()}
    assert windows.pop("fedavg-lora-full") == 0 and set(windows.values()) == {200}
    assert {name: config.memory.layers for name, config in found.items()} == {
        name: "last:8" if name == "fednl" else "none" for name in found
    }
    found = configs("mmlu", tmp_path, "memory.window-tokens=256")
    assert [name for name, config in found.items() if config.memory.window_tokens] == [mmlu.FEDNL.name, mmlu.OWN.name]


def test_a_part_that_is_left_out_stays_out(tmp_path: Path) -> None:
    found = configs("ablation", tmp_path, "memory.rule=gated-delta", "memory.rank=16")
    made = {name: (config.memory.rule, config.memory.rank) for name, config in found.items()}
    assert made[ablation.HEBBIAN.name] == ("hebbian", 16) and made[ablation.NO_PROJECTION.name] == ("gated-delta", 0)
    assert made[ablation.FULL.name] == ("gated-delta", 16)


def test_how_a_method_is_trained_and_how_large_it_is_is_the_users(tmp_path: Path) -> None:
    found = configs("needles", tmp_path, "training.local-lr=2e-3", "lora.rank=4")
    assert {config.training.local_lr for config in found.values()} == {2e-3}
    assert {name: config.lora.rank for name, config in found.items()} == {
        name: 0 if name == "fednl" else 4 for name in found
    }
    found = configs("unseen", tmp_path, "training.local-lr=2e-3")
    assert {config.training.local_lr for config in found.values()} == {2e-3}


@pytest.mark.parametrize(
    ("table", "given", "told"),
    [
        ("needles", "federation.algorithm=fedprox", r"\(fednl, fedavg-lora-window, .*\) each set their own federation"),
        ("unseen", 'data.hold-out-clients=["passkey"]', r"fednl-without-passkey, .* and the others\) each set their"),
        ("ifed-icl", "classification.source=mine.csv", r"\(bbc-news\) each set their own classification.source"),
        ("needles", "data.task=mmlu", "data.task is what makes the table needles: leave it away"),
        ("needles", "memory.window-tokens=0", "fedavg-lora-window and fedavg-lora-full .* one run under two names"),
        ("ablation", "memory.rule=hebbian", "full and hebbian of the table ablation would be one run"),
        ("traffic", "training.rounds", "write section.key=value"),
    ],
)
def test_what_would_belie_a_lines_name_is_refused_before_any_run(
    table: str, given: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=told):
        Sitting(table_named(table), "small", tmp_path / "out", given=(given,)).whole()


def test_the_page_says_which_runs_keep_their_own(tmp_path: Path) -> None:
    given = ("memory.window-tokens=200", "training.rounds=2")
    sitting = Sitting(table_named("needles"), "small", tmp_path, given=given)
    assert kept_own(given, sitting.methods)[1] == (
        "- `memory.window-tokens=200`: not fedavg-lora-full (`memory.window-tokens=0`)"
    )
    assert "- `memory.window-tokens=200`: not fedavg-lora-full" in page.head(sitting)
    assert kept_own(given[1:], sitting.methods) == []


def test_what_a_run_sets_is_told_as_it_was_run(tmp_path: Path) -> None:
    run, method = Run(tmp_path / "fedavg-lora-full"), Method("fedavg-lora-full", ("memory.window-tokens=0",))
    run.write_json("config.json", {"memory": {"window-tokens": 0}, "training": {"local-lr": 0.5}})
    run.append_jsonl("rounds.jsonl", {"round": 1, "clients": [{"up_bytes": 1, "down_bytes": 1, "cpu_s": 1.0}]})
    scale = Scale("", (), own={method.name: ("training.local-lr=3e-3",)})
    told = page.runs_table(Run(tmp_path), {method: 1}, scale)[-1]
    assert told == "- fedavg-lora-full: `memory.window-tokens=0 training.local-lr=0.5`"


def test_at_every_length_the_runs_are_those_of_the_table() -> None:
    assert set(needles.lines_at(16_384)) < set(table_named("needles").lines("small"))


def test_a_pages_command_tells_nobodys_folders(tmp_path: Path) -> None:
    given = (f"mmlu.source={tmp_path}/questions.jsonl", 'text.sources=["~/mine.txt", "bbc-news/tech"]', "run.seed=1")
    sitting = Sitting(table_named("mmlu"), "small", tmp_path / "mine", given=given)
    assert sitting.command == (
        """fednl reproduce mmlu --scale small --set 'mmlu.source=".../questions.jsonl"' """
        """--set 'text.sources=[".../mine.txt", "bbc-news/tech"]' --set run.seed=1 --out .../mine"""
    )
    usual = Sitting(table_named("mmlu"), "small", Path("runs/reproduce-mmlu-small"))
    assert usual.command == "fednl reproduce mmlu --scale small --out runs/reproduce-mmlu-small"


@pytest.mark.parametrize("table", ["needles", "mmlu", "ifed-icl", "unseen", "ablation"])
def test_a_table_of_answers_needs_questions(table: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=rf"\[data\] test = 0, but the table {table} is made of answers"):
        Sitting(table_named(table), "small", tmp_path, given=("data.test=0",)).whole()


def test_a_file_is_no_folder_for_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"--out .*file is a file: name a folder"):
        Sitting(table_named("mmlu"), "tiny", tmp_path / "file").whole()
    with pytest.raises(FednlError, match=r"cannot write .*inner"):
        Sitting(table_named("mmlu"), "tiny", tmp_path / "file" / "inner").whole()


@pytest.mark.parametrize("lengths", [",", " ", "1" * 5000, "0", "-5", "1k", "512,,x"])
def test_lengths_that_are_no_numbers_are_refused(lengths: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["reproduce", "needles", "--scale", "tiny", "--lengths", lengths])
    shown = capfd.readouterr().err
    assert left.value.code == 2 and "write prompt tokens with commas between" in " ".join(shown.split())
    assert len(shown) < 400


def test_a_single_round_has_no_last_one() -> None:
    first, second = ({"clients": [{"up_bytes": size, "down_bytes": 1}]} for size in (514, 2))
    told = {row["when"]: row["value"] for row in traffic.message_rows("", [first]) if row["metric"] == "up_bytes"}
    assert told == {"first round": 514, "in all": 514}
    told = {r["when"]: r["value"] for r in traffic.message_rows("", [first, second]) if r["metric"] == "up_bytes"}
    assert told == {"first round": 514, "last round": 2, "in all": 516}


def test_how_many_are_asked_at_other_lengths_leaves_runs_as_they_are_and_is_a_run_s_where_it_asks_itself(
    tmp_path: Path,
) -> None:
    def numbers(table: str, *given: str, **asked: Any) -> set[int]:
        sitting = Sitting(table_named(table), "small", tmp_path, given=given, **asked)
        return {sitting.config(method).data.test for method in sitting.methods}

    long = {"asked_lengths": (4096,)}
    assert numbers("needles", "data.test=10", **long) == {15} and numbers("needles", "data.test=10") == {10}
    assert numbers("needles", "data.test=10", asked_facts=(8,)) == {15}
    # Its texts are read by runs as they are: the setting is theirs, and nothing else takes it.
    assert numbers("streaming", "data.test=3", asked_lengths=(8192,)) == {3}
    # One run that was made with ten: it stays as it is, and the others are made alike.
    made = Sitting(table_named("needles"), "small", tmp_path, given=("data.test=10",)).config(needles.FEDNL)
    Run(tmp_path / "fednl").write_json("config.json", made.to_dict())
    assert numbers("needles", "data.test=10", **long) == numbers("needles", "data.test=5", **long) == {10}
    assert numbers("needles", "data.test=5") == {5} and numbers("needles", **long) == {15}
