"""The needle table at the tiny scale, whole: it goes on where it stopped, and its two columns never mix."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fednl.errors import Interrupted, SettingsError
from fednl.reproduce import keeping, needles, table_named
from fednl.reproduce.papers import NEEDLES
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.tiny import tiny_settings
from fednl.runs import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table's folder, made in two sittings: the first one is stopped in the middle of the third run."""
    out = tmp_path_factory.mktemp("needles")

    def stop(event: Mapping[str, Any]) -> None:
        if event["event"] == "phase" and str(event["name"]).startswith("fedavg-lora-full: training"):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        reproduce(out, stop)
    return out


def reproduce(out: Path, on_event: Any = lambda event: None, **more: Any) -> str:
    return Sitting(table_named("needles"), "tiny", out, on_event=on_event, **more).whole().text


def test_the_same_command_goes_on_per_arm_and_a_third_call_does_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = (folder / "report.md").read_text()
    assert needles.FLOOR.name in half and "Closed by FedNL" not in half
    began: list[str] = []
    notes: list[str] = []

    def tell(event: Mapping[str, Any]) -> None:
        began.append(str(event.get("name", "")))
        notes.extend([str(event["text"])] if event["event"] == "note" else [])

    text = reproduce(folder, tell)
    trained = [name.partition(":")[0] for name in began if "training" in name]
    assert notes[0] == "1 of 6, fednl: FedNL" and notes[-1].startswith("6 of 6, fednl: window only")
    assert trained == ["fedavg-lora-full", "fedala-window", "ffa-lora-window"]
    for name in ("train", "resume", "evaluate"):
        monkeypatch.setattr(keeping, name, None)
    assert reproduce(folder) == text == (folder / "report.md").read_text()
    rows = json.loads((folder / "results" / "needles-430.json").read_text())
    assert rows["where"] == "measured here"
    asked = {
        line.name: keeping.questions(Run(folder / line.method.name), ("data.tokens=430",)) for line in needles.LINES
    }
    ours = asked[needles.OURS.name]
    assert sorted(ours) == ["passkey", "uuid-code"] and ours == asked[needles.FLOOR.name]
    marks = {row["method"]: row.get("note", "") for row in rows["rows"] if row["metric"] == "recall"}
    assert marks == {name: "asked other prompts" if theirs != ours else "" for name, theirs in asked.items()}
    macro = {row["method"]: row for row in rows["rows"] if (row["metric"], row["client"]) == ("candidates", "macro")}
    assert list(macro) == [line.name for line in needles.LINES]
    assert all(row["n"] == 4 and row["chance"] == 0.25 and row["low"] <= row["value"] for row in macro.values())
    assert {row["of"] for row in rows["rows"] if row["metric"] == "share_closed"} == {"candidates", "nats_per_token"}


def test_the_papers_numbers_stand_in_their_own_column(folder: Path) -> None:
    text = reproduce(folder)
    first = next(part for part in text.split("\n\n") if part.startswith("| method"))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in first.splitlines()]
    assert lines[0][1:] == ["candidates, %, 430 tokens (measured here)", "average (reported by the paper)"]
    by_name = {line[0]: line[1:] for line in lines[2:]}
    assert by_name["FedNL"][1] == "29.7" and "[" in by_name["FedNL"][0]
    assert by_name["FedProx"] == ["-", "20"]
    assert by_name[needles.FLOOR.name][1] == "-"
    assert all("[" not in line[1] for line in by_name.values())
    for note in NEEDLES.notes:
        assert note in text


def test_other_settings_do_not_pass_for_these(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"\[training\] local-lr = 0.003, and now it is 0.1"):
        reproduce(folder, given=("training.local-lr=0.1",))


def test_other_lengths_have_a_report_of_their_own(folder: Path) -> None:
    before = (folder / "report.md").read_text()
    text = reproduce(folder, asked_lengths=(470,))
    assert (folder / "report-470.md").read_text() == text and "## 470 tokens" in text and "## 430 tokens" not in text
    assert (folder / "report.md").read_text() == before
    assert {path.name for path in (folder / "results").glob("*-4*0.json")} == {"needles-430.json", "needles-470.json"}


def test_runs_that_are_there_are_asked_as_many_questions_as_are_asked_for(folder: Path) -> None:
    reproduce(folder, asked_lengths=(450,), given=("data.test=1",))
    rows = json.loads((folder / "results" / "needles-450.json").read_text())["rows"]
    assert {row["n"] for row in rows if (row["metric"], row["client"]) == ("candidates", "macro")} == {2}
    with pytest.raises(SettingsError, match=r"\[data\] test = 2, and now it is 1"):
        reproduce(folder, given=("data.test=1",))
    with pytest.raises(SettingsError, match=r"\[data\] test = 0, but the table needles is made of answers"):
        reproduce(folder, asked_lengths=(450,), given=("data.test=0",))


def test_more_facts_have_three_lines_and_a_report_of_their_own(folder: Path) -> None:
    text = reproduce(folder, asked_facts=(3,))
    assert (folder / "report-facts-3.md").read_text() == text and "## 430 tokens, 3 facts" in text
    assert "--facts 3" in text
    rows = json.loads((folder / "results" / "needles-430-facts-3.json").read_text())["rows"]
    assert list(dict.fromkeys(row["method"] for row in rows if row["metric"] == "recall")) == [
        line.name for line in (needles.OURS, needles.FLOOR, needles.CEILING)
    ]
    usual = json.loads((folder / "results" / "needles-430.json").read_text())["rows"]
    assert [row["value"] for row in rows if row["metric"] == "nats_per_token"] != [
        row["value"] for row in usual if row["metric"] == "nats_per_token"
    ][: len([row for row in rows if row["metric"] == "nats_per_token"])]


def test_a_runs_own_folder_is_not_filled_with_others(folder: Path) -> None:
    with pytest.raises(SettingsError, match="is the folder of a run: name another"):
        reproduce(folder / "fednl")


def test_three_lines_are_measured_at_long_prompts_and_full_attention_beyond_its_reach_is_said_to_be() -> None:
    assert [line.method.name for line in needles.lines_at(4096)] == ["fednl", "fedavg-lora-window", "fedavg-lora-full"]
    assert len(needles.lines_at(2048)) == 7
    assert needles._outside(needles.CEILING.name, 16_384, 8192) == "outside trained range"
    assert needles._outside(needles.CEILING.name, 8192, 8192) == needles._outside("FedNL", 16_384, 8192) == ""
    row = {
        "metric": "share_closed",
        "of": "candidates",
        "client": "macro",
        "value": 0.7,
        "low": 0.6,
        "high": 0.8,
        "n": 9,
    }
    assert "70.0 [60.0, 80.0]% of the way" in needles.closed_lines([row], needles.asked_at(8192))[1]
    alike = {key: value for key, value in row.items() if key not in ("low", "high")} | {"value": 1.0}
    assert needles.closed_lines([alike], needles.asked_at(8192))[1] == (
        "- candidates: 100.0% of the way from floor to ceiling, n = 9; no interval, as FedNL's outcomes are those of "
        "the ceiling at every question: that is no certainty"
    )


def test_a_letter_is_not_recalled_and_the_users_number_of_questions_counts_at_every_length() -> None:
    assert needles.asked_at(1024, answer="letters").metrics == ("candidates", "nats_per_token")
    assert needles.asked_at(1024).metrics == ("candidates", "recall", "nats_per_token")
    assert needles.changed_at(4096) == ["data.tokens=4096", "data.test=5", "evaluation.batch=1"]
    given = ("data.test=7", "training.rounds=2")
    assert needles.changed_at(4096, given=given) == ["data.tokens=4096", "evaluation.batch=1", "data.test=7"]
    assert needles.asked_at(4096, given=given).changed == ("data.tokens=4096", "evaluation.batch=1", "data.test=7")


def test_the_ceiling_is_asked_the_very_questions_of_the_window(tmp_path: Path) -> None:
    """The window moves events in a short prompt only, so that lines stay comparable where they are measured."""
    from fednl.data import task
    from fednl.models.tiny import byte_tokenizer

    place = Sitting(table_named("needles"), "small", tmp_path)
    filler = tiny_settings(tmp_path)["data"]["filler"]
    prompts = []
    for method in (needles.FEDNL, needles.FULL_LORA):
        config = place.config(method).with_overrides(
            ["data.tokens=1024", f"data.filler={filler}", "data.train=0", "data.validation=0", "data.test=2"]
        )
        window = 2 * config.memory.window_tokens  # a token a byte makes long questions
        made = task("needles")(config.data, byte_tokenizer(), window, "candidates", 0)
        prompts.append([one.prompt_ids for splits in made.values() for one in splits.test])
    assert prompts[0] == prompts[1] and len(prompts[0]) == 14
