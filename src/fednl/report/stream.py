"""The tables of a stream of tasks, and what is to be said where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fednl.errors import CheckpointError
from fednl.evaluation.measures import METRICS
from fednl.evaluation.rows import Row
from fednl.evaluation.settings import ARMS
from fednl.evaluation.stream import BACKWARD_TRANSFER, FORGETTING, STREAM_METRICS
from fednl.federation.algorithms import ALGORITHMS
from fednl.report.cells import bracket
from fednl.report.words import escape, markdown_table, percent
from fednl.runs import Run

NAME = "stream"


def one_task_line(config: Mapping[str, Any]) -> list[str]:
    """Says so where an algorithm that guards earlier tasks had none to guard, as it then is FedAvg.

    Args:
        config: a run's resolved settings.
    """
    name = config.get("federation", {}).get("algorithm")
    tasks = len(config.get("tasks", {}).get("order", ()))
    if name not in ALGORITHMS or not ALGORITHMS[name].traits.needs_tasks or tasks > 1:
        return []
    return [
        f"With one task {escape(name)} has nothing to hold fast: these rules are FedAvg's, bit for bit. Give [tasks] "
        "order two tasks or more."
    ]


def stream_section(run: Run) -> list[str]:
    """Gives the section of `results/stream.json`; nothing where the run was no stream.

    Args:
        run: the run.
    """
    if not (run.path / "results" / f"{NAME}.json").exists():
        return []
    try:
        result = run.read_json(f"results/{NAME}.json")
    except CheckpointError as error:
        return [f"## Stream of tasks\n\n{escape(str(error))}"]
    rows: list[Row] = result["rows"]
    parts = ["## Stream of tasks", _orders(result["orders"])]
    for metric in STREAM_METRICS:
        own = [row for row in rows if metric in (row["metric"], row.get("of"))]
        if own:
            parts += [f"### {METRICS[metric].title}", _table(own, metric), _behind(own, metric)]
    parts.append(
        "Forgetting: the best that a task was answered before the last one, against now, mean over all tasks but the "
        "last; more is worse. Backward transfer: now against just after the task; for accuracy more is better, for "
        "nats less. Macro over clients; in brackets 95% intervals (of paired questions, within clients), "
        "which take the best as it is."
    )
    return parts


def _orders(orders: Mapping[str, Sequence[str]]) -> str:
    lines: dict[str, list[str]] = {}
    for client, tasks in orders.items():
        lines.setdefault(", then ".join(map(escape, tasks)), []).append(escape(client))
    return "\n".join(f"- {', '.join(clients)}: {tasks}" for tasks, clients in lines.items())


def _table(rows: Sequence[Row], metric: str) -> str:
    cells = {(row["method"], row["metric"], row.get("after"), row.get("task")): row for row in rows}
    places = sorted({(row["after"], row["task"]) for row in rows if "after" in row})
    head = [f"after {after}: task {task}" for after, task in places]
    last = ["average forgetting", "backward transfer"] if len(places) > 1 else []
    body = []
    for arm in dict.fromkeys(row["method"] for row in rows):
        found = [cells.get((arm, metric, *place)) for place in places]
        found += [cells.get((arm, name, None, None)) for name in (FORGETTING, BACKWARD_TRANSFER)][: len(last)]
        body.append([escape(ARMS.get(arm, arm)), *(_cell(row, metric) for row in found)])
    return markdown_table(["rules", *head, *last], body)


def _cell(row: Row | None, metric: str) -> str:
    if row is None:
        return "-"
    scale, form = METRICS[metric].scale, METRICS[metric].form
    form = form if "after" in row else f"+{form}"
    return f"{format(scale * row['value'], form)}{bracket(row, scale, form)}"


def _behind(rows: Sequence[Row], metric: str) -> str:
    counts = sorted({row["n"] for row in rows if row["metric"] == metric})
    chances = [f"; chance {percent(chance)}" for chance in sorted({row["chance"] for row in rows if "chance" in row})]
    clients = sorted({row["clients"] for row in rows})
    over = f"over {' or '.join(map(str, clients))} clients{''.join(chances)}"
    return f"n = {', '.join(map(str, counts))} questions a cell, {over}."
