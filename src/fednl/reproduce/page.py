"""How a reproduced table is written: what was measured here beside what the paper prints, each labelled. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednl.config_text import toml_value
from fednl.evaluation.measures import METRICS
from fednl.evaluation.rows import MACRO, Row
from fednl.report.cells import cell, difference
from fednl.report.setup import run_facts, setup_lines
from fednl.report.tables import arm_table, behind
from fednl.report.words import escape, markdown_table, megabytes, number
from fednl.reproduce.given import kept_own, key_of, without_folders
from fednl.reproduce.table import Line, Method, Published, Scale
from fednl.runs import Run

if TYPE_CHECKING:
    from fednl.reproduce.sitting import Sitting

MEASURED, REPORTED = "measured here", "reported by the paper"
MISSING = "-"


def head(sitting: Sitting) -> str:
    """What every page begins with."""
    table = sitting.table
    text = (
        f"# {table.name}, scale {sitting.scale}\n\n{table.about}\n\nScale: {sitting.size.about}. Made by "
        f"`{sitting.command}` (`...` is a folder of whoever gave it); the same command goes on with what is missing. "
        f'Columns headed "{MEASURED}" hold numbers of the runs in this folder, columns headed "{REPORTED}" what the '
        "paper prints of other models and other data: they stand beside each other, and nothing is computed of both."
    )
    return "\n\n".join([text, *kept_own(sitting.given, sitting.methods)])


def beside(
    names: Sequence[str],
    ours: Mapping[str, Mapping[str, str]],
    published: Sequence[Published],
    lines: Sequence[Line],
) -> str:
    """A table of our columns, then one of each paper's table; the papers' lines that have none of ours come last.

    Args:
        names: headings of our columns.
        ours: heading -> line -> what its cell shows.
        published: the papers' tables, of which the last column is shown.
        lines: the table's lines; of those of one name the first says where it stands in the papers.
    """
    first = {line.name: line for line in reversed(lines)}
    body = [
        [
            escape(name),
            *(ours[heading].get(name, MISSING) for heading in names),
            *(_printed(one, first[name]) for one in published),
        ]
        for name in dict.fromkeys(line.name for line in lines)
    ]
    used = {line.published for line in lines}
    for name in dict.fromkeys(name for one in published for name in one.rows if name not in used):
        printed = [_number(one.rows[name][-1]) if name in one.rows else MISSING for one in published]
        body.append([escape(name), *(MISSING for _ in names), *printed])
    heads = [f"{name} ({MEASURED})" for name in names] + [f"{one.heading} ({REPORTED})" for one in published]
    return markdown_table(["method", *map(escape, heads)], body)


def _printed(published: Published, line: Line) -> str:
    if line.published not in published.rows:
        return MISSING
    shown = _number(published.rows[line.published][-1])
    return shown if line.name == line.published else f"{line.published}: {shown}"


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.10g}"


def as_published(published: Published) -> str:
    """The paper's table, with its source and what has to be known to read it."""
    body = [[escape(name), *map(_number, values)] for name, values in published.rows.items()]
    notes = "\n".join(f"- {note}" for note in published.notes)
    return "\n\n".join(
        [
            f"### {published.what} ({REPORTED})",
            markdown_table(["method", *published.columns], body),
            f"Source: {published.source}. Model: {published.model}.",
            *([notes] if notes else []),
        ]
    )


def macro_cells(rows: Sequence[Row], metric: str) -> dict[str, str]:
    """The macro average of every line, with its 95% interval."""
    found = [row for row in rows if (row["metric"], row["client"]) == (metric, MACRO)]
    return {row["method"]: cell(row, metric) for row in found}


def by_client(rows: Sequence[Row], metric: str, where: str = "") -> list[str]:
    """Our numbers of one metric, client by client."""
    title = f"### {METRICS[metric].title}{where} ({MEASURED})"
    return [title, arm_table(rows, metric), "; ".join(behind(rows, metric)) + "."]


def behind_all(run: Path, scale: str, parts: Sequence[tuple[str, str, Sequence[Row]]]) -> str:
    """Says what stands behind our columns of the first table: how many questions, chance, model, scale.

    Args:
        run: the folder of the table's first run.
        scale: of the reproduction.
        parts: title, the metric that its column shows, and rows of every set of questions.
    """
    facts = run_facts(Run(run), []) if (run / "partition.json").exists() else {}
    model = facts.get("backbone", {}).get("name", "not known yet")
    counts = [f"{title}: {'; '.join(behind(rows, metric))}" for title, metric, rows in parts if rows]
    return ". ".join([f"Measured here on {escape(model)}, scale {scale}", *counts]) + "."


def chance_line(above: Mapping[str, bool]) -> list[str]:
    """Says which lines answer no better than guessing, as far as these questions tell."""
    below = [escape(name) for name, told in above.items() if not told]
    if not below:
        return []
    if len(below) == len(above):
        return [
            "No line's answers are told from guessing (no interval lies above chance): where cross-entropies differ, "
            "they say how the answers are weighed, not who knows more."
        ]
    return [f"Not told from guessing (the interval does not lie above chance): {'; '.join(below)}."]


def differences(rows: Iterable[Row], where: str = "") -> list[str]:
    """The paired differences in words."""
    lines = [f"- {difference(row)}" for row in rows if row["metric"] == "difference"]
    return [f"### Paired differences, macro{where} ({MEASURED})", "\n".join(lines)] if lines else []


INTERVALS = (
    "In brackets: 95% intervals over the questions (score intervals of shares, else bootstrap within clients; macro "
    'counts each client once, differences are paired by question). "Better" and "worse" are said of these rules: of a '
    "method, three training seeds could say it, and this is one: `fednl report DIR DIR DIR`."
)


def runs_table(out: Run, shared: Mapping[Method, int | None], scale: Scale) -> list[str]:
    """What every run of the table is: its settings, numbers shared, bytes as serialised, the clients' CPU-seconds.

    Args:
        out: the folder of the runs.
        shared: the table's methods, with how many numbers of each cross the network; None where it has none yet.
        scale: at which they are run.
    """
    body, own = [], []
    for method, numbers in shared.items():
        rounds = Run(out.path / method.name).read_jsonl("rounds.jsonl")
        clients = [client for row in rounds for client in row.get("clients", [])]
        if not clients:
            continue
        up, down = (megabytes([one[key] for one in clients if key in one]) for key in ("up_bytes", "down_bytes"))
        cpu_s = sum(one.get("cpu_s", 0.0) for one in clients)
        body.append([escape(method.name), number(numbers), up, down, number(len(rounds)), f"{cpu_s:,.0f}"])
        config = Run(out.path / method.name).read_json("config.json")
        sets = [_as_run(one, config) for one in dict.fromkeys(map(key_of, scale.beside(method)))]
        own += [f"- {escape(method.name)}: `{' '.join(sets)}`"] if sets else []
    heads = ["run", "numbers shared", "up, per client and round", "down", "rounds", "CPU-s of the clients"]
    parts = [f"### The runs ({MEASURED})", markdown_table(heads, body)] if body else []
    return [*parts, *(["What each sets beside the scale's own settings:", "\n".join(own)] if own else [])]


def _as_run(name: str, config: Mapping[str, Any]) -> str:
    """A setting as a run has it: the command line may have given another value than the table's."""
    section, _, key = name.partition(".")
    return without_folders(f"{name}={toml_value(config[section][key])}")


def setup(run: Run) -> list[str]:
    """What the table's first run was: backbone, memory, data, training, software and commit."""
    if not (run.path / "config.json").exists():
        return []
    return [f"### Setup of the run {run.path.name} ({MEASURED})", "\n".join(setup_lines(run, run_facts(run, [])))]
