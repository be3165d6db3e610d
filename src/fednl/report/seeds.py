"""Runs that differ in their seed only, put together: what may be claimed of a method."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from fednl.evaluation.measures import METRICS
from fednl.evaluation.rows import Row
from fednl.evaluation.seeds import LEAST_SEEDS, OverSeeds, over_seeds, same_but_seed
from fednl.evaluation.settings import ARMS
from fednl.evaluation.statistics import told_ends
from fednl.report.cells import bracket
from fednl.report.words import escape, markdown_table, number
from fednl.runs import Run

HOW_TO_READ = (
    f"Macro differences, first arm minus second; in brackets Student's 95% interval over training seeds. "
    f"A method is called better or worse with {LEAST_SEEDS} or more seeds, and an interval without 0; each line is "
    "judged by itself."
)


def seed_lines(runs: Sequence[Run], rows: Mapping[str, Sequence[tuple[str, Sequence[Row]]]]) -> list[str]:
    """Gives a table over seeds for every group of runs with the same settings; a sentence where there is no such group.

    Args:
        runs: finished runs, in the order of the report.
        rows: by the path of a run, its results files as (task, rows).
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if (run.path / "config.json").exists():
            key = json.dumps(same_but_seed(run.read_json("config.json")), sort_keys=True)
            groups.setdefault(key, []).append(run)
    parts = []
    for group in groups.values():
        tasks = dict.fromkeys(task for run in group for task, _ in rows[str(run.path)])
        for task in tasks if len(group) > 1 else ():
            files = [part for run in group for name, part in rows[str(run.path)] if name == task]
            lengths = dict.fromkeys(row.get("tokens") for part in files for row in part)
            for tokens in lengths:
                found = over_seeds([[row for row in part if row.get("tokens") == tokens] for part in files])
                if found:
                    names = ", ".join(escape(run.path.name) for run in group)
                    length = f", {tokens} tokens" if len(lengths) > 1 else ""
                    parts += [f"## {escape(task)}{length}: seeds of one setting ({names})", seed_table(found)]
    if not parts:
        return [
            f"No two of these runs differ in their seed only, so nothing here says that a method is better: that takes "
            f"{LEAST_SEEDS} seeds of each setting."
        ]
    return [*parts, HOW_TO_READ]


def seed_table(found: Sequence[OverSeeds]) -> str:
    """Gives a line for every comparison: its difference by seed, their mean, and what may be claimed.

    Args:
        found: from `fednl.evaluation.seeds.over_seeds`.
    """
    return markdown_table(["comparison", "of", "by seed", "mean", "verdict"], [_line(one) for one in found])


def _line(one: OverSeeds) -> list[str]:
    metric = METRICS[one.of]
    scale, form, unit = metric.scale, f"+{metric.form}", metric.gap_unit
    names = [escape(ARMS.get(arm, arm)) for arm in (one.method, one.baseline)]
    what = " minus ".join(names) + (f", from token {number(one.from_token)}" if one.from_token is not None else "")
    if one.metric == "share_closed":
        scale, form, unit, what = 100.0, ".1f", "%", f"{names[0]}: closed of the way from {names[1]}"
    by_seed = ", ".join(f"{format(scale * value, form)} ({seed})" for seed, value in sorted(one.by_seed.items()))
    mean = "-"
    if one.interval is not None:
        mean = f"{format(scale * one.interval.mean, form)} {unit}{bracket(told_ends(one.interval), scale, form)}"
    return [what, escape(one.of), by_seed or "-", mean, escape(one.verdict) or "-"]
