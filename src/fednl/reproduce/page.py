"""How a reproduced table is written: what was measured here beside what the paper prints, each labelled. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fednl.evaluation.measures import METRICS
from fednl.evaluation.rows import MACRO, Row
from fednl.report.cells import cell, difference
from fednl.report.setup import run_facts, setup_lines, shared_parameters
from fednl.report.tables import arm_table, behind
from fednl.report.words import escape, markdown_table, megabytes, number
from fednl.reproduce.table import Line, Method, Published
from fednl.runs import Run

MEASURED, REPORTED = "measured here", "reported by the paper"
MISSING = "-"


def head(title: str, about: str, command: str) -> str:
    """What every page begins with."""
    return (
        f"# {title}\n\n{about}\n\nMade by `{command}`; the same command goes on with what is missing. "
        f'Columns headed "{MEASURED}" hold numbers of the runs in this folder, columns headed "{REPORTED}" what the '
        "paper prints of other models and other data: they stand beside each other, and nothing is computed of both."
    )


def beside(
    names: Sequence[str],
    ours: Mapping[str, Mapping[str, str]],
    published: Published,
    lines: Sequence[Line],
    column: str = "average",
) -> str:
    """A table of our columns and the paper's one; the paper's lines that have none of ours come last.

    Args:
        names: headings of our columns.
        ours: heading -> line -> what its cell shows.
        published: the paper's table.
        lines: the table's lines.
        column: which of the paper's columns is shown.
    """
    place = published.columns.index(column)
    body = [
        [escape(line.name), *(ours[name].get(line.name, MISSING) for name in names), _printed(published, line, place)]
        for line in lines
    ]
    used = {line.published for line in lines}
    body += [
        [escape(name), *(MISSING for _ in names), _number(values[place])]
        for name, values in published.rows.items()
        if name not in used
    ]
    heads = [f"{name} ({MEASURED})" for name in names]
    return markdown_table(["method", *map(escape, heads), f"{column} ({REPORTED})"], body)


def _printed(published: Published, line: Line, place: int) -> str:
    if line.published not in published.rows:
        return MISSING
    shown = _number(published.rows[line.published][place])
    return shown if line.name == line.published else f"{line.published}: {shown}"


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:g}"


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


def differences(rows: Iterable[Row], where: str = "") -> list[str]:
    """The paired differences in words."""
    lines = [f"- {difference(row)}" for row in rows if row["metric"] == "difference"]
    return [f"### Paired differences, macro{where} ({MEASURED})", "\n".join(lines)] if lines else []


INTERVALS = (
    "In brackets: 95% intervals over the questions (a client's share: Wilson's; macro averages, which count each "
    'client once, and differences: bootstrap within clients). "Better" and "worse" are said of these rules: of a '
    "method, only three training seeds could say it, and this is one."
)


def runs_table(out: Run, methods: Iterable[Method]) -> list[str]:
    """What every run of the table is: its settings, numbers shared, bytes as serialised, the clients' CPU-seconds.

    Args:
        out: the folder of the runs.
        methods: those of the table; one that has no round yet is left out.
    """
    body = []
    for method in methods:
        run = Run(out.path / method.name)
        rounds = run.read_jsonl("rounds.jsonl")
        clients = [client for row in rounds for client in row.get("clients", [])]
        if not clients:
            continue
        up, down = (megabytes([one[key] for one in clients if key in one]) for key in ("up_bytes", "down_bytes"))
        cpu_s = sum(one.get("cpu_s", 0.0) for one in clients)
        own = ", ".join(method.sets) or "as the scale sets it"
        shared = number(shared_parameters(run, "federated", shared_groups(run)))
        body.append([escape(method.name), escape(own), shared, up, down, number(len(rounds)), f"{cpu_s:,.0f}"])
    heads = ["run", "its own settings", "numbers shared", "up, per client and round", "down", "rounds", "CPU-s"]
    return [f"### The runs ({MEASURED})", markdown_table(heads, body)] if body else []


def shared_groups(run: Run) -> list[str]:
    """The groups of a run's rules that crossed the network, as its results say; nothing where nothing did."""
    for path in sorted((run.path / "results").glob("*.json")):
        rows = run.read_json(f"results/{path.name}").get("rows", [])
        for row in rows:
            if row.get("method") == "federated" and row.get("shared"):
                return list(row["shared"])
    return []


def setup(run: Run) -> list[str]:
    """What the table's first run was: backbone, memory, data, training, software and commit."""
    if not (run.path / "config.json").exists():
        return []
    return [f"### Setup of the run {run.path.name} ({MEASURED})", "\n".join(setup_lines(run, run_facts(run, [])))]
