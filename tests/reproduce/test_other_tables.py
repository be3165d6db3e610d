"""Every table at the tiny scale, whole; what a paper prints is never computed with and always labelled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fednl import cli
from fednl.errors import Interrupted
from fednl.evaluation.cohort import COHORT
from fednl.evaluation.measures import TEXT
from fednl.reproduce import SCALES, TABLES, keeping, mmlu, papers, table_named, traffic, unseen
from fednl.reproduce.comparison import Answers, Asked
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Published
from fednl.runs import Run

# The needle table has a file of its own.
HERE = ["mmlu", "unseen", "traffic", "ifed-icl"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each table's folder, made."""
    made = {}
    for name in HERE:
        made[name] = tmp_path_factory.mktemp(name)
        Sitting(table_named(name), "tiny", made[name]).whole()
    return made


@pytest.mark.parametrize("name", HERE)
def test_it_is_written_with_both_sides_labelled_and_a_second_call_does_nothing(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in ("train", "resume", "evaluate"):
        monkeypatch.setattr(keeping, work, None)
    page = Sitting(table_named(name), "tiny", folders[name]).whole()
    assert (folders[name] / "report.md").read_text() == page.text
    assert "(measured here)" in page.text and "### The runs (measured here)" in page.text
    assert ("(reported by the paper)" in page.text) == (name != "unseen")
    for file in (folders[name] / "results").glob("*.json"):
        kept = json.loads(file.read_text())
        assert (kept["table"], kept["scale"], kept["where"]) == (name, "tiny", "measured here")
        assert kept["rows"] and all(row["n"] > 0 for row in kept["rows"])


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_settings_of_all_methods_are_read(scale: str, tmp_path: Path) -> None:
    from fednl.reproduce import ifed_icl, needles

    lines = {"mmlu": mmlu.LINES, "needles": needles.LINES, "traffic": traffic.LINES}
    parts = [part for one in unseen.FEDERATIONS[scale] for part in unseen.asked_of(one)]
    lines["unseen"] = tuple(line for part in parts for line in part.lines)
    lines["ifed-icl"] = tuple(
        line for name, one in ifed_icl._TEXTS[scale].items() for line in ifed_icl.lines_of(name, one)
    )
    for name, some in lines.items():
        assert set(table_named(name).scales) == set(SCALES)
        sitting = Sitting(table_named(name), scale, tmp_path)
        for line in some:
            assert sitting.config(line.method).training.rounds > 0


def test_every_table_is_told_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
    told = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(told) == sorted(TABLES)


def test_an_unseen_client_is_in_no_training_and_answers_alone(folders: dict[str, Path]) -> None:
    rows = json.loads((folders["unseen"] / "results/unseen.json").read_text())["rows"]
    for client in unseen.FEDERATIONS["tiny"][0].left_out:
        run = Run(folders["unseen"] / f"fednl-without-{client}")
        n = {(row["client"], row["split"]): row["n"] for row in run.read_json("partition.json")["rows"]}
        assert n[client, "train"] == 0 and sum(n[other, "train"] for other, _ in n if other != client) > 0
        trained = {one["name"] for row in run.read_jsonl("rounds.jsonl") for one in row["clients"]}
        assert client not in trained
        alone = Run(folders["unseen"] / f"own-rules-of-{client}")
        assert {one["name"] for row in alone.read_jsonl("rounds.jsonl") for one in row["clients"]} == {client}
    by_line = {row["method"]: row for row in rows if (row["metric"], row["client"]) == ("candidates", "macro")}
    assert all((row["n"], row["clients"]) == (4, 2) for row in by_line.values()) and len(by_line) == 5
    texts = json.loads((folders["unseen"] / "results/unseen-text.json").read_text())["rows"]
    assert {row["client"] for row in texts if row["metric"] == TEXT.metrics[0]} - {"macro", *COHORT} == {"market"}
    asked = {row["client"] for row in rows if row["metric"] == "candidates"} - {"macro", *COHORT}
    assert asked == set(unseen.FEDERATIONS["tiny"][0].left_out)


def test_bytes_are_those_of_the_messages(folders: dict[str, Path]) -> None:
    rows = json.loads((folders["traffic"] / "results/traffic.json").read_text())["rows"]
    found = {(row["method"], row["metric"], row["when"]): row for row in rows}
    for line in traffic.LINES:
        run = Run(folders["traffic"] / line.method.name)
        sent = [one["up_bytes"] for row in run.read_jsonl("rounds.jsonl") for one in row["clients"]]
        whole = found[line.name, "up_bytes", "in all"]
        assert (whole["value"], whole["n"]) == (sum(sent), len(sent))
        shared = keeping.numbers_shared(run)
        size = 2 if line.method.name.endswith("half") else 4
        assert shared and found[line.name, "up_bytes", "last round"]["least"] > size * shared
    half, full = (
        keeping.numbers_shared(Run(folders["traffic"] / name)) for name in ("ffa-lora-half", "fedavg-lora-half")
    )
    assert half is not None and full is not None and 0 < half < full


def test_chance_is_that_of_the_classes(folders: dict[str, Path]) -> None:
    rows = json.loads((folders["ifed-icl"] / "results/ifed-icl-tiny-texts.json").read_text())["rows"]
    assert {row["chance"] for row in rows if row["metric"] == "accuracy" and row["client"] == "macro"} == {0.5}
    assert "chance 50%" in (folders["ifed-icl"] / "report.md").read_text()


def test_fed_ssi_with_one_task_reads_fed_avgs_run_and_says_so() -> None:
    line = next(line for line in mmlu.LINES if line.published == "FedSSI")
    assert line.method is mmlu.FEDAVG and "with one task FedAvg" in line.name


@pytest.mark.parametrize("published", [papers.NEEDLES, papers.MMLU_QWEN, papers.MMLU_LLAMA])
def test_a_printed_average_is_that_of_its_line(published: Published) -> None:
    for name, values in published.rows.items():
        assert len(values) == len(published.columns), name
        cells = [value for value in values[:-1] if value is not None]
        if len(cells) == len(values) - 1:
            assert values[-1] == pytest.approx(sum(cells) / len(cells), abs=0.06), name


def test_the_papers_needle_cells_are_whole_questions() -> None:
    """As its notes say: 1/25 and 1/15."""
    for name, values in papers.NEEDLES.rows.items():
        n = 15 if name in ("FedALA", "FFA-LoRA") else 25
        assert all(abs(value * n / 100 - round(value * n / 100)) < 0.02 for value in values[:-1] if value), name


def called(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["reproduce", *words])
    return (int(left.value.code or 0), *capfd.readouterr())


def test_the_command_prints_the_table_and_writes_it(
    folders: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = called(capfd, "mmlu", "--scale", "tiny", "--out", str(folders["mmlu"]))
    assert code == 0 and out == (folders["mmlu"] / "report.md").read_text()
    assert f"`fednl reproduce mmlu --scale tiny --out .../{folders['mmlu'].name}`" in out
    assert not [path for path in folders["mmlu"].rglob("*.md") if str(folders["mmlu"]) in path.read_text()]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Interrupted("Stopped; go on with `fednl train --resume x`.")])
def test_after_ctrl_c_the_same_command_is_named(
    stop: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stopped(self: Sitting) -> None:
        raise stop

    monkeypatch.setattr(Sitting, "whole", stopped)
    code, out, err = called(capfd, "mmlu", "--scale", "tiny", "--out", str(tmp_path))
    assert (code, out) == (1, "")
    assert f"what was done is kept in {tmp_path}: the same command goes on." in err and "--resume" not in err


def test_a_table_without_lengths_or_facts_says_so(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = called(capfd, "mmlu", "--scale", "tiny", "--lengths", "512", "--out", str(tmp_path))
    assert code == 2 and "the table mmlu has no prompt lengths" in err
    code, _, err = called(capfd, "streaming", "--scale", "tiny", "--facts", "8", "--out", str(tmp_path))
    assert code == 2 and "the table streaming has no facts in its prompts; leave it away" in err


@pytest.mark.parametrize(
    ("name", "answer", "title", "metrics"),
    [
        ("mmlu", "letters", "a letter of four", ("accuracy", "nats_per_token")),
        ("mmlu", "candidates", "the text of one of four", ("accuracy", "nats_per_token")),
        ("needles", "letters", "1,024 tokens", ("candidates", "nats_per_token")),
        ("unseen", "letters", "passkey", ("candidates", "nats_per_token")),
    ],
)
def test_what_is_asked_is_titled_and_measured_by_the_form_of_its_answers(
    name: str, answer: str, title: str, metrics: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Asked] = []

    def answered(sitting: Sitting, some: list[Asked]) -> list[dict[str, Answers]]:
        asked.extend(some)
        return []

    monkeypatch.setattr(f"fednl.reproduce.{name}.answered", answered)
    place = Sitting(table_named(name), "small", tmp_path, given=(f"evaluation.answer={answer}",))
    assert list(place.table.work(place)) == []
    assert (asked[0].title, asked[0].metrics) == (title, metrics)


def test_a_table_that_is_just_begun_says_so(tmp_path: Path) -> None:
    place = Sitting(table_named("unseen"), "tiny", tmp_path)
    page = next(iter(place.table.work(place)))
    assert page.measured == {} and page.text.count("Nothing is measured yet.") == 2
    assert "Measured here on tiny-model, scale tiny.\n" in page.text and "n = ." not in page.text
