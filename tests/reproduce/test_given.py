"""What `--set` reaches in a table: never what makes a line what its name says, and nobody's folders on a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from fednl.config import Config
from fednl.errors import SettingsError
from fednl.reproduce import ablation, mmlu, needles, page, table_named
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
    assert [name for name, config in found.items() if config.memory.window_tokens] == [mmlu.FEDNL.name]


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
