"""In which order lines of several sets of questions are measured; no run is made here."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fednl.evaluation.outcomes import Outcome, other_questions
from fednl.reproduce import needles, table_named
from fednl.reproduce.comparison import Asked, Shown, above_chance, answered, comparison_rows, written
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Line, Method
from fednl.runs import Run


class Recorder:
    """Stands for a sitting: says which runs were asked for which arms, and under which settings."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []

    def note(self, text: str) -> None:
        pass

    def answers(self, method: Method, arms: list[str], changed: tuple[str, ...]) -> dict[str, list[Any]]:
        self.asked.append((method.name, tuple(arms), changed))
        return {arm: [f"{method.name}/{arm}{changed}"] for arm in arms}


def test_first_lines_of_all_come_before_second_ones_and_a_run_is_loaded_once_for_its_lines() -> None:
    def lines(who: str) -> tuple[Line, ...]:
        ours, other = Method(f"ours-{who}"), Method(f"other-{who}")
        return Line("a", ours), Line("b", ours, "window-only"), Line("c", other)

    sitting, asked = Recorder(), [Asked(who, who, lines(who), ()) for who in ("x", "y")]
    pages = list(answered(sitting, asked))  # type: ignore[arg-type]
    assert [(name, arms) for name, arms, _ in sitting.asked] == [
        ("ours-x", ("federated", "window-only")),
        ("ours-y", ("federated", "window-only")),
        ("other-x", ("federated",)),
        ("other-y", ("federated",)),
    ]
    assert [sorted(page["y"]) for page in pages] == [[], ["a", "b"], ["a", "b"], ["a", "b", "c"]]


def test_lengths_that_share_a_run_are_measured_one_after_the_other_on_their_own_lines() -> None:
    run, other = Method("run"), Method("other")
    short = (Line("a", run), Line("b", other), Line("c", run, "window-only"))
    asked = [Asked("1", "1", short, (), ("data.tokens=1",)), Asked("2", "2", short[:2], (), ("data.tokens=2",))]
    sitting = Recorder()
    page = list(answered(sitting, asked))[-1]  # type: ignore[arg-type]
    assert [(name, changed[0][-1]) for name, _, changed in sitting.asked] == [
        ("run", "1"),
        ("run", "2"),
        ("other", "1"),
        ("other", "2"),
        ("run", "1"),
    ]
    assert list(page["1"]) == ["a", "b", "c"] and list(page["2"]) == ["a", "b"]


def test_where_prompts_have_no_common_length_rows_have_none() -> None:
    one = Asked("x", "x", (Line("a", Method("a")),), ("candidates",))
    rows = comparison_rows({"a": outcomes(9, 1.0), "b": outcomes(8, 1.0)}, one, 0, {})
    assert any(row["metric"] == "difference" for row in rows) and not any("tokens" in row for row in rows)


def test_a_line_is_told_from_guessing_where_its_interval_lies_above_chance() -> None:
    common = {"metric": "candidates", "client": "macro", "chance": 0.25}
    rows = [{**common, "method": "a", "low": 0.26}, {**common, "method": "b", "low": 0.25}]
    rows.append({"metric": "nats_per_token", "client": "macro", "method": "a", "low": 9.0})
    assert above_chance(rows, "candidates") == {"a": True, "b": False}


def outcomes(right: int, nats: float) -> list[Outcome]:
    """Fifteen answers of each of two clients, so many of them right."""
    return [
        Outcome(client, at, int(at >= right), 0, at < right, at < right, nats * (1 + 0.01 * at), 1.0, 3)
        for client in ("passkey", "uuid-code")
        for at in range(15)
    ]


def test_what_is_won_where_a_line_does_not_count_is_no_win(tmp_path: Path) -> None:
    sitting, one = Sitting(table_named("needles"), "small", tmp_path), needles.asked_at(16_384)
    lines = (needles.OURS, needles.FLOOR, needles.CEILING)
    answers = {line.name: outcomes(*how) for line, how in zip(lines, ((14, 0.5), (5, 2.0), (3, 3.0)), strict=True)}
    mark = partial(needles._why_not, out=tmp_path, reach=8192)
    shown = Shown((), "", mark=mark, more=needles.closed_lines, rows=needles.rows_of)
    page = written(sitting, [one], {one.name: answers}, shown)
    rows = page.measured[one.name]
    gaps = {(row["baseline"], row["of"]): row for row in rows if row["metric"] == "difference"}
    assert gaps[needles.FLOOR.name, "candidates"]["verdict"] == "better"
    for of in one.metrics:
        row = gaps[needles.CEILING.name, of]
        assert row["verdict"] == "outside trained range, does not count" and "p" not in row
    assert [row["metric"] for row in rows if row["metric"] == "share_closed" and "value" in row] == []
    assert page.text.count("no share, as floor or ceiling does not count (outside trained range)") == 2
    assert {row.get("note") for row in rows if row["method"] == needles.CEILING.name} == {"outside trained range"}
    names = [line.split("|")[1].strip() for line in page.text.splitlines() if line.startswith("| FedAvg-LoRA, full")]
    assert set(names[1:]) == {f"{needles.CEILING.name} (outside trained range)"} and len(names) == 4
    assert json.dumps(rows).count("outside trained range, does not count") == len(one.metrics)


def test_runs_that_read_a_source_which_changed_in_between_are_not_compared(tmp_path: Path) -> None:
    """Numbers and right answers agree, so that nothing but the questions' names tells."""
    sitting, one = Sitting(table_named("needles"), "small", tmp_path), needles.asked_at(512)

    def named(how: tuple[int, float], text: str) -> list[Outcome]:
        return [replace(one, question=f"{text} {one.index}") for one in outcomes(*how)]

    answers = {
        needles.OURS.name: named((14, 0.5), "a"),
        needles.FLOOR.name: named((5, 2.0), "a"),
        needles.CEILING.name: named((3, 3.0), "b"),
        needles.LINES[3].name: outcomes(5, 2.0),  # of a folder from before there were names
    }
    shown = Shown((), "", more=needles.closed_lines, rows=needles.rows_of)
    page = written(sitting, [one], {one.name: answers}, shown)
    verdicts = {(row["baseline"], row["verdict"]) for row in page.measured[one.name] if row["metric"] == "difference"}
    assert verdicts == {
        (needles.FLOOR.name, "better"),
        (needles.LINES[3].name, "better"),
        (needles.CEILING.name, "asked other prompts, does not count"),
    }
    assert page.text.count("no share, as floor or ceiling does not count (asked other prompts)") == 2


def test_lines_that_were_asked_other_prompts_are_not_compared(tmp_path: Path) -> None:
    sitting, one = Sitting(table_named("needles"), "small", tmp_path), needles.asked_at(512, 16)
    for line, prompts in ((needles.OURS, "a"), (needles.FLOOR, "a"), (needles.CEILING, "b")):
        run = Run(tmp_path / line.method.name)
        run.write_json("config.json", sitting.config(line.method).to_dict())
        run.write_json("results/needles-512-events-16.json", {"rows": [], "questions": {"passkey": prompts}})
    answers = {line.name: outcomes(*how) for line, how in zip(one.lines, ((14, 0.5), (5, 2.0), (3, 3.0)), strict=True)}
    mark = partial(needles._why_not, out=tmp_path, reach=8192)
    assert [mark(line.name, one) for line in one.lines] == ["", "", "asked other prompts"]
    shown = Shown((), "", mark=mark, more=needles.closed_lines, rows=needles.rows_of)
    page = written(sitting, [one], {one.name: answers}, shown)
    verdicts = {(row["baseline"], row["verdict"]) for row in page.measured[one.name] if row["metric"] == "difference"}
    assert verdicts == {(needles.FLOOR.name, "better"), (needles.CEILING.name, "asked other prompts, does not count")}
    assert page.text.count("no share, as floor or ceiling does not count (asked other prompts)") == 2


@pytest.mark.parametrize("change", ["golds", "counts"])
def test_lines_whose_answers_cannot_be_paired_do_not_stop_the_table(tmp_path: Path, change: str) -> None:
    """As of folders from before questions had names: only right answers or their number tell."""
    sitting, one = Sitting(table_named("needles"), "small", tmp_path), needles.asked_at(512)
    answers = {line.name: outcomes(*how) for line, how in zip(one.lines, ((14, 0.5), (5, 2.0), (3, 3.0)), strict=False)}
    others = answers[needles.CEILING.name]
    answers[needles.CEILING.name] = [replace(x, gold=1) for x in others] if change == "golds" else others[:-2]
    page = written(sitting, [one], {one.name: answers}, Shown((), "", more=needles.closed_lines, rows=needles.rows_of))
    gaps = {(row["baseline"], row["of"]): row for row in page.measured[one.name] if row["metric"] == "difference"}
    assert gaps[needles.FLOOR.name, "candidates"]["verdict"] == "better"
    for of in one.metrics:
        row = gaps[needles.CEILING.name, of]
        assert row["verdict"] == "asked other prompts, does not count" and row.keys().isdisjoint({"value", "p", "low"})
    assert f"FedNL minus {needles.CEILING.name}: asked other prompts, does not count" in page.text
    assert page.text.count("no share, as floor or ceiling does not count (asked other prompts)") == 2


def test_questions_of_clients_that_one_line_alone_answers_are_no_other_ones() -> None:
    some = outcomes(9, 1.0)
    assert not other_questions(some, some[15:]) and not other_questions(some[::-1], some)
    assert other_questions(some, some[14:])


def test_a_ceiling_that_is_worse_than_the_floor_is_no_end_of_a_way(tmp_path: Path) -> None:
    sitting, one = Sitting(table_named("needles"), "small", tmp_path), needles.asked_at(512)
    lines = (needles.OURS, needles.FLOOR, needles.CEILING)
    answers = {line.name: outcomes(*how) for line, how in zip(lines, ((15, 0.5), (12, 2.0), (1, 3.0)), strict=True)}
    page = written(sitting, [one], {one.name: answers}, Shown((), "", more=needles.closed_lines, rows=needles.rows_of))
    assert page.text.count("no share, as the ceiling is worse than the floor") == 2 and "of the way" not in page.text
