"""The table of how unequally clients fare: worst client, spread, head, middle and tail."""

from __future__ import annotations

from collections.abc import Sequence

from fednl.evaluation.cohort import COHORT, SPREAD, WORST
from fednl.evaluation.measures import METRICS
from fednl.evaluation.rows import Row
from fednl.evaluation.settings import ARMS
from fednl.report.cells import bracket
from fednl.report.words import escape, markdown_table

_WORDS = {WORST: "worst client", SPREAD: "spread, best minus worst"}


def cohort_table(rows: Sequence[Row], metric: str) -> list[str]:
    """Gives the table of one metric, and who is behind head, middle and tail; nothing where it was not measured.

    Args:
        rows: the rows of one results file.
        metric: a name in `METRICS`; for `"recall"` there is no table, as it mostly is 0.
    """
    if metric == "recall":
        return []
    cells = {(row["method"], row["client"]): row for row in rows if row["metric"] == metric and row["client"] in COHORT}
    columns = [name for name in COHORT if any(client == name for _, client in cells)]
    if not columns:
        return []
    arms = dict.fromkeys(arm for arm, _ in cells)
    body = [[escape(ARMS.get(arm, arm)), *(_cell(cells.get((arm, name)), metric) for name in columns)] for arm in arms]
    groups = {name: row["of"] for (_, name), row in cells.items() if name not in _WORDS}
    behind = [f"{name}: {', '.join(map(escape, members))}" for name, members in groups.items()]
    notes = ["By training examples, " + "; ".join(behind) + "."] if behind else []
    return [markdown_table(["arm", *(_WORDS.get(name, name) for name in columns)], body), *notes]


def _cell(row: Row | None, metric: str) -> str:
    if row is None:
        return "-"
    scale, form = METRICS[metric].scale, METRICS[metric].form
    who = f" ({escape(row['of'][0])})" if row["client"] == WORST else ""
    return f"{format(scale * row['value'], form)}{bracket(row, scale, form)}{who}"
