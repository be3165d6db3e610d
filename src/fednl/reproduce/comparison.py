"""Lines of a table that answer the same questions: who is asked what, the rows, the page. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

from fednl.evaluation.measures import METRICS
from fednl.evaluation.outcomes import Outcome, other_questions
from fednl.evaluation.rows import CHANCE, MACRO, Row, result_rows
from fednl.reproduce import page
from fednl.reproduce.table import Line, Page, Published
from fednl.runs import Run

if TYPE_CHECKING:
    from fednl.reproduce.sitting import Sitting

Answers = dict[str, list[Outcome]]
"""Line -> its answers."""
OTHERS = "asked other prompts"


@dataclass(frozen=True)
class Asked:
    """One set of questions.

    Attributes:
        name: of its results file.
        title: what a column of it is headed, without the unit.
        lines: who is asked, in the table's order.
        metrics: names in `METRICS`; the first stands beside the papers'.
        changed: settings under which the runs answer, where they are not their own, as for `fednl eval --set`.
        tokens: prompt length; None where prompts have no common one.
        chance: how often guessing is right.
    """

    name: str
    title: str
    lines: tuple[Line, ...]
    metrics: tuple[str, ...]
    changed: tuple[str, ...] = ()
    tokens: int | None = None
    chance: float = CHANCE


def answered(sitting: Sitting, asked: Sequence[Asked]) -> Iterator[dict[str, Answers]]:
    """Trains and measures what is missing, line by line, and gives all answers so far after each step.

    Lines that follow one another and share a run are measured together. The first lines of all sets of questions come
    before the second ones, so that a table that is stopped has whole lines.

    Args:
        sitting: where the runs are.
        asked: the sets of questions.

    Yields:
        Name of a set -> line -> answers; a line that is not measured yet is missing.
    """
    found: dict[str, Answers] = {one.name: {} for one in asked}
    by_run = [[tuple(own) for _, own in groupby(one.lines, key=lambda line: line.method)] for one in asked]
    groups = list(dict.fromkeys(own for rank in zip_longest(*by_run, fillvalue=()) for own in rank if own))
    for place, own in enumerate(groups, 1):
        sitting.note(f"{place} of {len(groups)}, {own[0].method.name}: {', '.join(line.name for line in own)}")
        for one in asked:
            theirs = [line for line in own if line in one.lines]
            if not theirs:
                continue
            answers = sitting.answers(own[0].method, [line.arm for line in theirs], one.changed)
            found[one.name] |= {line.name: answers[line.arm] for line in theirs}
        yield {one.name: _in_order(found[one.name], one.lines) for one in asked}


def comparison_rows(answers: Answers, one: Asked, seed: int, marks: Mapping[str, str]) -> list[Row]:
    """Makes rows of every line, and of the first against each other.

    Args:
        answers: line -> its answers.
        one: the questions.
        seed: the runs' seed.
        marks: line -> why its numbers do not count; a difference to one that answered other questions has no value.
    """
    first = one.lines[0].name
    rest = [name for name in answers if name != first] if first in answers else []
    pairs = [(first, name) for name in rest if marks.get(name) != OTHERS]
    rows = result_rows(answers, seed=seed, tokens=one.tokens, metrics=one.metrics, pairs=pairs, chance=one.chance)
    common: Row = {"client": MACRO, "metric": "difference", "seed": seed}
    common |= {} if one.tokens is None else {"tokens": one.tokens}
    for name in (name for name in rest if marks.get(name) == OTHERS):
        rows += [{"method": first, "baseline": name, "of": metric} | common for metric in one.metrics]
    return rows


@dataclass(frozen=True)
class Shown:
    """What a page of a comparison says beside the numbers.

    Attributes:
        published: the papers' tables; none where no paper prints one.
        reading: what has to be known to read it.
        mark: why a line's numbers do not count at some questions; empty where they do.
        more: further parts of the section of some questions, from its rows.
        rows: makes the rows of some questions, from the answers to them, the runs' seed, and what `mark` says of lines.
    """

    published: tuple[Published, ...]
    reading: str
    mark: Callable[[str, Asked], str] = lambda line, one: ""
    more: Callable[[Sequence[Row], Asked], list[str]] = lambda rows, one: []
    rows: Callable[[Answers, Asked, int, Mapping[str, str]], list[Row]] = comparison_rows


def written(sitting: Sitting, asked: Sequence[Asked], found: Mapping[str, Answers], shown: Shown) -> Page:
    """A comparison as far as there are answers, as a page.

    Args:
        sitting: whose folder says what the runs were.
        asked: the sets of questions.
        found: as `answered` gives it.
        shown: what the page says beside the numbers.
    """
    out = Run(sitting.out)
    lines = list(dict.fromkeys(line for one in asked for line in one.lines))
    seed = sitting.config(lines[0].method).run.seed
    marks = {
        one.name: {
            line.name: asked_others(found[one.name], line.name, one) or shown.mark(line.name, one) for line in one.lines
        }
        for one in asked
    }
    measured = {
        one.name: without_claims(shown.rows(found[one.name], one, seed, marks[one.name]), marks[one.name])
        for one in asked
    }
    ours = {
        f"{METRICS[one.metrics[0]].column}, {one.title}": {
            line: with_mark(cell, marks[one.name][line])
            for line, cell in page.macro_cells(measured[one.name], one.metrics[0]).items()
        }
        for one in asked
    }
    parts = [page.head(sitting)]
    parts += [page.beside(list(ours), ours, shown.published, lines)]
    sets = [(one.title, one.metrics[0], measured[one.name]) for one in asked]
    parts += [page.behind_all(out.path / lines[0].method.name, sitting.scale, sets)]
    parts += [shown.reading, page.INTERVALS]
    for one in asked:
        rows, where = measured[one.name], f", {one.title}"
        parts.append(f"## {one.title}")
        if not rows:
            parts.append("Nothing is measured yet.")
            continue
        parts += [*shown.more(rows, one), *page.chance_line(above_chance(rows, one.metrics[0]))]
        for metric in one.metrics:
            named = [row | {"method": with_mark(row["method"], marks[one.name][row["method"]])} for row in rows]
            parts += page.by_client(named, metric, where)
        parts += page.differences(rows, where)
    if shown.published:
        parts += ["## What the papers print", *map(page.as_published, shown.published)]
    parts.append("## How it was made")
    parts += page.runs_table(out, sitting.numbers_shared(lines), sitting.size)
    parts += page.setup(Run(sitting.out / lines[0].method.name))
    return Page("\n\n".join(parts) + "\n", {name: rows for name, rows in measured.items() if rows})


def asked_others(answers: Answers, line: str, one: Asked) -> str:
    """Says that a line answered other questions than the first one: their source or settings changed in between.

    Args:
        answers: line -> its answers, as far as there are any.
        line: the line's name.
        one: the questions.

    Returns:
        Why its numbers do not count; empty where they do.
    """
    return OTHERS if other_questions(answers.get(one.lines[0].name, ()), answers.get(line, ())) else ""


def without_claims(rows: Sequence[Row], marks: Mapping[str, str]) -> list[Row]:
    """Gives the rows with no verdict where a line's numbers do not count; each row of such a line says why in `note`.

    Args:
        rows: of a comparison; not modified.
        marks: line -> why its numbers do not count; empty where they do.
    """
    made = []
    for row in rows:
        why = marks.get(row["method"]) or marks.get(row.get("baseline", ""))
        if why and row["metric"] == "difference":
            row = {key: value for key, value in row.items() if key != "p"} | {"verdict": f"{why}, does not count"}
        made.append(row | ({"note": why} if why else {}))
    return made


def with_mark(text: str, why: str) -> str:
    """A line's name or number, with why its numbers do not count; as it is where they do."""
    return f"{text} ({why})" if why else text


def above_chance(rows: Sequence[Row], metric: str) -> dict[str, bool]:
    """Says of every line whether its macro average is told from guessing: its interval lies above chance."""
    macro = [row for row in rows if (row["metric"], row["client"]) == (metric, MACRO) and "chance" in row]
    return {row["method"]: row["low"] > row["chance"] for row in macro}


def _in_order(answers: Answers, lines: Sequence[Line]) -> Answers:
    return {line.name: answers[line.name] for line in lines if line.name in answers}
