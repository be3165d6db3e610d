"""The tables of a run, as Markdown and for a terminal: every number with its n, chance and interval."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednl.errors import CheckpointError
from fednl.evaluation.cohort import COHORT
from fednl.evaluation.measures import METRICS
from fednl.evaluation.rows import MACRO, Row, leaks
from fednl.evaluation.settings import ARMS
from fednl.report.cells import bracket, cell, difference, narrow_cell
from fednl.report.cohort import cohort_table
from fednl.report.published import is_table, table_report
from fednl.report.seeds import seed_lines
from fednl.report.setup import run_facts, setup_lines, shared_parameters
from fednl.report.stream import NAME as STREAM
from fednl.report.stream import stream_section
from fednl.report.training import training_lines
from fednl.report.words import escape, markdown_table, name_only, number, percent
from fednl.runs import Run

if TYPE_CHECKING:
    from rich.table import Table

_ROW_KEYS = {"method", "client", "metric", "value", "n"}


def report(paths: Sequence[Path]) -> str:
    """Gives the tables of one or more runs as Markdown; of folders of published tables, what their seeds say together.

    Per run: what it was, how training went (rounds, seconds, bytes as serialised per direction, clients that
    did not count), and for each results file the arms by client, paired differences in words and the
    aggregation drop. Several runs get a table of their macro averages first. An unfinished run or a missing
    file is said plainly.

    Args:
        paths: folders of runs, or of published tables (`fednl reproduce TABLE --out FOLDER`).

    Raises:
        SettingsError: a path is neither, or there are both.
        CheckpointError: a run's files hold values of another kind than was written.
    """
    if any(is_table(Run(Path(path))) for path in paths):
        return table_report([Run(Path(path)) for path in paths])
    runs = [Run.open(Path(path)) for path in paths]
    parts = [_readable(run) for run in runs]
    return "\n\n".join([_compared(runs), *parts] if len(runs) > 1 else parts) + "\n"


def _readable(run: Run) -> str:
    try:
        return _run(run)
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # of a list for a number, and the like
        raise CheckpointError(
            f"{run.path}: a value in config.json, partition.json, rounds.jsonl or results/ is not of the kind that "
            f"fednl writes ({error}); restore the file that was edited."
        ) from error


def terminal_table(rows: Sequence[Row], metric: str = "candidates") -> Table:
    """Gives one metric as a table for a terminal: a line per client and the macro average, a column per arm.

    Args:
        rows: the rows of one results file; where they hold several prompt lengths, the first is shown.
        metric: a name in `fednl.evaluation.measures.METRICS`.

    Returns:
        A table for `rich.console.Console.print`.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    rows = next(_by_tokens(rows), [])
    cells = _index(rows)
    notes = [*behind(rows, metric), "below each: 95% interval"] if rows else []
    table = Table(title=METRICS[metric].title, caption="; ".join(notes), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("client", overflow="fold")
    arms = _arms(rows, metric)
    for arm in arms:
        table.add_column(Text(ARMS.get(arm, arm)), justify="right", overflow="fold")
    for client in [*_clients(rows, metric), MACRO]:
        if client == MACRO:
            table.add_section()
        shown = [narrow_cell(cells.get((arm, client, metric)), metric) for arm in arms]
        table.add_row(Text(client), *map(Text, shown))
    return table


def _results(run: Run) -> Iterator[tuple[str, dict[str, Any] | CheckpointError]]:
    """Reads the results of a run, file by file by name, 640 before 1280; a damaged one gives its error."""
    for path in sorted((run.path / "results").glob("*.json"), key=lambda path: _by_number(path.stem)):
        if path.stem == STREAM:
            continue
        try:
            yield path.stem, run.read_json(f"results/{path.name}")
        except CheckpointError as error:
            yield path.stem, error


def _by_number(name: str) -> list[tuple[int, str]]:
    """A sorting key in which digits count as the number they write."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split("([0-9]+)", name) if part]


def _run(run: Run) -> str:
    results = list(_results(run))
    facts = run_facts(run, [result for _, result in results if isinstance(result, dict)])
    parts = [f"# {escape(run.path.name)}", "\n".join(setup_lines(run, facts)), "## Training"]
    parts += training_lines(run)
    if not results:
        parts.append(f"Nothing is measured yet; `fednl train --resume {run.path}` goes on.")
    for task, result in results:
        if isinstance(result, CheckpointError):
            parts.append(f"## {escape(task)}\n\n{escape(str(result))}")
            continue
        rows = _usable(result)
        changed = result.get("changed")
        if not rows:
            parts.append(f"## {escape(task)}\n\nresults/{escape(task)}.json holds no rows.")
        for alike in _by_tokens(rows):
            parts += _result(task, alike, run, changed if isinstance(changed, dict) else {})
    parts += stream_section(run)
    return "\n\n".join(parts)


def _usable(result: Mapping[str, Any] | CheckpointError) -> list[Row]:
    """The rows that hold what a table needs; a file edited by hand may hold others, and a damaged one none."""
    if isinstance(result, CheckpointError):
        return []
    found = []
    for row in result.get("rows") or []:
        if isinstance(row, dict):
            found += [row] if set(row) >= _ROW_KEYS else []
    return [row for row in found if row["metric"] != "difference" or (row.get("of") in METRICS and "baseline" in row)]


def _result(task: str, rows: Sequence[Row], run: Run, changed: Mapping[str, Any]) -> list[str]:
    """The section of one results file at one prompt length; `changed` holds settings that are not the run's own."""
    tokens = rows[0].get("tokens")
    parts = [f"## {escape(task)}" + (f", {tokens} tokens" if tokens else "")]
    if changed:
        words = [f"{escape(key)} = {escape(name_only(value))}" for key, value in changed.items()]
        parts.append(f"The run's own rules under other settings: {', '.join(words)}.")
    for metric in METRICS:
        if _arms(rows, metric):
            parts += [f"### {METRICS[metric].title}", arm_table(rows, metric)]
            parts.append("; ".join(behind(rows, metric)) + ".")
            parts += cohort_table(rows, metric)
    parts.append(
        "In brackets: 95% intervals over the questions (score intervals of shares, else bootstrap within clients; "
        "macro counts each client once, differences are paired by question). "
        'They do not cover another training seed: "better" and "worse" are said of these rules, and need an interval '
        "without 0 and, for right or wrong, McNemar's exact p of at most 0.05, each client's questions weighing as in "
        "the average (of macro-F1 a randomised p: answers swapped between the arms). Losses that are too few, or do "
        "not vary, have no interval and no verdict. What is said of a method takes three seeds: `fednl report "
        "RUN RUN RUN`."
    )
    parts += _shared_lines(rows, run)
    parts += _leak_line(rows)
    differences = [row for of in METRICS for row in rows if row["metric"] == "difference" and row.get("of") == of]
    if differences:
        lines = [f"- {difference(row)}" for row in differences]
        parts += ["### Paired differences, macro", "\n".join(lines)]
    drops = [row for row in rows if row["metric"] == "aggregation_drop_pp"]
    if drops:
        body = [
            [escape(row["client"]), f"{row['value']:+.1f}{bracket(row, 1, '+.1f')}", str(row["n"])] for row in drops
        ]
        parts += [
            "### Aggregation drop (local-only minus federated accuracy), pp",
            markdown_table(["client", "drop", "n"], body),
        ]
    return parts


def arm_table(rows: Sequence[Row], metric: str) -> str:
    """Gives one metric of a results file as Markdown: a line per arm, a column per client and the macro average.

    Args:
        rows: of one prompt length.
        metric: a name in `fednl.evaluation.measures.METRICS`.
    """
    cells = _index(rows)
    clients = [*_clients(rows, metric), MACRO]
    body = [
        [escape(ARMS.get(arm, arm)), *(cell(cells.get((arm, client, metric)), metric) for client in clients)]
        for arm in _arms(rows, metric)
    ]
    return markdown_table(["arm", *map(escape, clients)], body)


def behind(rows: Sequence[Row], metric: str) -> list[str]:
    """Says which n and which chance level stand behind a table.

    Args:
        rows: of one prompt length.
        metric: a name in `fednl.evaluation.measures.METRICS`.
    """
    found = [row for row in rows if row["metric"] == metric]
    each = {row["client"]: row["n"] for row in found if row["client"] not in (MACRO, *COHORT)}
    if len(set(each.values())) == 1:
        text = f"n = {next(iter(each.values()))} questions per client"
    else:
        text = "n = " + ", ".join(f"{n} ({escape(client)})" for client, n in each.items())
    whole = {row["method"]: row["n"] for row in found if row["client"] == MACRO}
    if whole:
        most = max(whole.values())
        fewer = [f"{n} for {escape(ARMS.get(arm, arm))}" for arm, n in whole.items() if n != most]
        text = f"{text}, {most} in all" if each else f"n = {most}"
        text += f" ({', '.join(fewer)})" if fewer else ""
    chances = sorted({row["chance"] for row in found if "chance" in row})
    return [text, *(f"chance {percent(chance)}" for chance in chances)]


def _shared_lines(rows: Sequence[Row], run: Run) -> list[str]:
    """Which groups of rules crossed the network, how many numbers they are, and which arms use them."""
    users: dict[str, list[str]] = {}
    for arm, groups in {row["method"]: row["shared"] for row in rows if "shared" in row}.items():
        count = shared_parameters(run, arm, groups)
        size = "" if count is None else f" ({count:,} parameters)"
        users.setdefault(escape(", ".join(groups)) + size, []).append(escape(ARMS.get(arm, arm)))
    return [f"Shared: {what}, used by: {', '.join(arms)}." for what, arms in users.items()]


def _leak_line(rows: Sequence[Row]) -> list[str]:
    row = _index(rows).get(("events-removed", MACRO, "candidates"))
    if row is None:
        return []
    verdict = "above chance: the prompts give answers away" if leaks(rows) else "not above chance, as it must be"
    return [f"With the events removed the answers are {verdict}."]


def _compared(runs: Sequence[Run]) -> str:
    """The macro averages of several runs in one table."""
    body = []
    found = {row["metric"] for run in runs for _, result in _results(run) for row in _usable(result)}
    shown = [metric for metric in METRICS if metric in found]
    for run in runs:
        for task, result in _results(run):
            for alike in _by_tokens(_usable(result)):
                cells = _index(alike)
                for arm in _arms(alike, *shown):
                    macro = [cells.get((arm, MACRO, metric)) for metric in shown]
                    first = next((row for row in macro if row is not None), {})
                    body.append(
                        [
                            *map(escape, (run.path.name, task, ARMS.get(arm, arm))),
                            number(first.get("tokens")),
                            *(cell(row, metric) for row, metric in zip(macro, shown, strict=True)),
                            number(first.get("n")),
                            number(first.get("seed")),
                        ]
                    )
    head = ["run", "task", "arm", "tokens", *(METRICS[metric].column for metric in shown), "n", "seed"]
    table = markdown_table(head, body) if body else "None of the runs is measured yet."
    usable = {
        str(run.path): [(task, _usable(result)) for task, result in _results(run) if isinstance(result, dict)]
        for run in runs
    }
    return "\n\n".join([f"# {len(runs)} runs, macro averages", table, *seed_lines(runs, usable)])


def _index(rows: Sequence[Row]) -> Mapping[tuple[str, str, str], Row]:
    return {(row["method"], row["client"], row["metric"]): row for row in rows if "baseline" not in row}


def _arms(rows: Sequence[Row], *metrics: str) -> list[str]:
    """The arms measured by any of these metrics: those we know in their order, then any others."""
    found = dict.fromkeys(row["method"] for row in rows if row["metric"] in metrics and "baseline" not in row)
    return [arm for arm in ARMS if arm in found] + [arm for arm in found if arm not in ARMS]


def _clients(rows: Sequence[Row], metric: str) -> list[str]:
    found = dict.fromkeys(row["client"] for row in rows if row["metric"] == metric)
    return [client for client in found if client not in (MACRO, *COHORT)]


def _by_tokens(rows: Sequence[Row]) -> Iterator[list[Row]]:
    for tokens in dict.fromkeys(row.get("tokens") for row in rows):
        yield [row for row in rows if row.get("tokens") == tokens]
