"""The streaming table at the tiny scale: resumed text by text, coarse bins out of fine ones, each number labelled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fednl.data.fillers import load_filler, split_regions
from fednl.errors import DataError, Interrupted, SettingsError
from fednl.evaluation.streaming import StreamNats
from fednl.models.tiny import byte_tokenizer
from fednl.reproduce import reading, streaming, table_named
from fednl.reproduce.sitting import Sitting


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made in two sittings: the first one is stopped while the second text is read."""
    out = tmp_path_factory.mktemp("streaming")

    def stop(event: Mapping[str, Any]) -> None:
        if event.get("name") == "reading text 2" and event["arm"] == "window-only":
            raise KeyboardInterrupt

    with pytest.raises((Interrupted, KeyboardInterrupt)):
        reproduce(out, stop)
    assert "n = 1 of 2 held-out texts" in (out / "report.md").read_text()
    return out


def reproduce(out: Path, on_event: Any = lambda event: None, **more: Any) -> str:
    return Sitting(table_named("streaming"), "tiny", out, on_event=on_event, **more).whole().text


def test_a_stopped_reading_goes_on_with_the_text_that_is_missing(folder: Path) -> None:
    lines = (folder / "fednl/results/streams-1100.jsonl").read_text().splitlines()
    assert len(lines) == 3
    began: list[tuple[str, str]] = []
    text = reproduce(folder, lambda event: began.append((event.get("name", ""), event.get("arm", ""))))
    assert [one for one in began if one[0].startswith("reading")] == [("reading text 2", "window-only")]
    assert (folder / "fednl/results/streams-1100.jsonl").read_text().splitlines()[:3] == lines
    assert "n = 2 of 2 held-out texts" in text and reproduce(folder) == text == (folder / "report.md").read_text()


def test_coarse_bins_are_made_of_fine_ones_and_the_cache_does_not_grow(folder: Path) -> None:
    reproduce(folder)
    coarse, cold = (
        json.loads((folder / "results" / f"{name}-1100.json").read_text())["rows"]
        for name in ("streaming", "cold-start")
    )
    level = {
        (row["method"], row["from_token"]): row for row in coarse if row["metric"] == "nats_per_token" and row["n"] == 2
    }
    assert sorted(level) == [("federated", 0), ("federated", 1024), ("window-only", 0), ("window-only", 1024)]
    assert len({(row["state_bytes"], row["kv_bytes"]) for row in level.values()}) == 1
    fine = [row["value"] for row in cold if (row["method"], row["metric"]) == ("federated", "nats_per_token")]
    assert len(fine) == 16  # the first bin has a token fewer: nothing is before it
    mean = (63 * fine[0] + 64 * sum(fine[1:])) / 1023
    assert level["federated", 0]["value"] == pytest.approx(mean, abs=1e-9)
    gaps = {row["from_token"]: row["value"] for row in coarse if row["metric"] == "difference"}
    expected = level["federated", 1024]["value"] - level["window-only", 1024]["value"]
    assert gaps[1024] == pytest.approx(expected, abs=1e-9)


def test_the_papers_change_stands_beside_ours_of_both_arms(folder: Path) -> None:
    names = [*(line.name for line in streaming.LINES), "FedAvg"]
    lines = beside(reproduce(folder))
    assert list(lines) == names and lines["FedNL"][1] == "-2.1" and lines["the same window, no memory"][1] == "-"
    assert not any("[" in line[0] for line in lines.values())  # two texts have no interval
    arms = {
        arm: [
            StreamNats((start,) * 16 + (0.9 * start + text / 10,), (63, *[64] * 16), (4,) * 17, (9,) * 17)
            for text in range(4)
        ]
        for arm, start in (("federated", 2.0), ("window-only", 3.0))
    }
    page = streaming.written(Sitting(table_named("streaming"), "tiny", folder), {1100: arms})
    lines = beside(page.text)
    # From 2.0 to 1.8, 1.9, 2.0 and 2.1: -2.5% on average.
    assert lines["FedNL"][0].startswith("-2.5 [") and lines["the same window, no memory"][0].startswith("-5.0 [")


def beside(text: str) -> dict[str, list[str]]:
    """The lines of a page's first table: ours and the paper's cell."""
    first = next(part for part in text.split("\n\n") if part.startswith("| method"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in first.splitlines()[2:]]
    return {line[0]: line[1:] for line in cells}


def test_all_lengths_that_are_asked_for_stand_on_one_page(folder: Path) -> None:
    text = reproduce(folder, asked_lengths=(130, 65))
    assert (folder / "report-130-65.md").read_text() == text
    for tokens in (130, 65):
        assert f"n = 2 of 2 held-out texts of {tokens} tokens" in text
        assert f"## Bins of 1,024 tokens, {tokens} tokens (measured here)" in text
        assert f"change from the first 1,024 tokens to the last, %, {tokens} tokens (measured here)" in text
        assert (folder / f"results/streaming-{tokens}.json").exists()
    assert text.count("### The runs") == text.count("# streaming, scale tiny") == 1


def test_the_texts_are_of_held_out_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, bool]] = []

    def documents(
        source: str, tokenizer: Any, count: int, tokens: int, *, held_out: bool, seed: int
    ) -> list[tuple[str, int]]:
        asked.append((source, count, held_out))
        return [(source, number) for number in range(count)]

    monkeypatch.setattr("fednl.data.documents.documents", documents)
    small = Sitting(table_named("streaming"), "small", tmp_path)
    found = reading.held_out_texts(small, byte_tokenizer(), 5, 16_384)
    assert asked == [("bbc-news/politics", 3, True), ("bbc-news/tech", 3, True)]
    assert found[:3] == [("bbc-news/politics", 0), ("bbc-news/tech", 0), ("bbc-news/politics", 1)] and len(found) == 5
    asked.clear()
    given = ('data.hold-out-clients=["sports", "tech"]',)
    reading.held_out_texts(Sitting(table_named("streaming"), "small", tmp_path, given=given), byte_tokenizer(), 2, 9)
    assert [source for source, _, _ in asked] == ["bbc-news/sports", "bbc-news/tech"]
    asked.clear()
    tiny = Sitting(table_named("streaming"), "tiny", tmp_path)
    reading.held_out_texts(tiny, byte_tokenizer(), 2, 9)
    assert asked == [("generated", 2, False)]


def test_the_text_is_the_runs_own_held_out_part_whatever_its_seed(tmp_path: Path) -> None:
    """The generated text depends on the seed: another one is text that the run's clients never had a part of."""
    sitting = Sitting(table_named("streaming"), "tiny", tmp_path, given=("run.seed=3",))
    (read,) = reading.held_out_texts(sitting, byte_tokenizer(), 1, 200)
    tested = split_regions(load_filler("generated", 3), byte_tokenizer(), 200)["test"]
    assert read == tested.ids[:200]


def test_the_summary_counts_bins_and_tells_whether_the_cache_grew() -> None:
    def level(place: int, size: int) -> dict[str, Any]:
        return {"method": "federated", "metric": "nats_per_token", "bin": place, "state_bytes": 64, "kv_bytes": size}

    gaps = [{"method": "federated", "metric": "difference", "verdict": word} for word in ("better", "better", "worse")]
    text = streaming.summary([level(0, 1000), level(1, 2500), *gaps, {"method": "federated", "metric": "difference"}])
    assert "better in 2 and worse in 1 of 4 bins" in text
    few = [level(0, 1000), {"method": "federated", "metric": "difference", "n": 2}]
    assert "none has an interval: that takes 3 texts or more that vary, and 2 are read" in streaming.summary(few)
    assert "64 + 1,000 bytes (memory state + keys and values) after the first bin and 64 + 2,500 after the last" in text


def test_what_other_rules_read_is_not_taken_for_these_and_one_bin_has_no_change(tmp_path: Path) -> None:
    def level(*given: str) -> float:
        text = reproduce(tmp_path, asked_lengths=(65,), given=given)
        assert next(line for line in text.splitlines() if line.startswith("| FedNL ")).split("|")[2].strip() == "-"
        rows = json.loads((tmp_path / "results/streaming-65.json").read_text())["rows"]
        return next(r["value"] for r in rows if (r["method"], r["metric"]) == ("federated", "nats_per_token"))

    first = level()
    shutil.rmtree(tmp_path / "fednl")
    assert level("training.local-lr=0.5") != first


def test_a_length_that_cannot_be_read_is_told_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--lengths 1: the first token of a text has nothing before it"):
        reproduce(tmp_path, asked_lengths=(1, 65))
    tiny = Sitting(table_named("streaming"), "tiny", tmp_path)
    with pytest.raises(DataError, match=r"--lengths 900000, 2 texts: .*text\.sources") as told:
        reading.held_out_texts(tiny, byte_tokenizer(), 2, 900_000)
    assert "data." not in str(told.value)
