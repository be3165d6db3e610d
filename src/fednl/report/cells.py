"""How one measured number, or one difference of two, is written with its interval."""

from __future__ import annotations

from fednl.evaluation.measures import METRICS
from fednl.evaluation.rows import MACRO, Row
from fednl.evaluation.settings import ARMS
from fednl.report.words import escape


def cell(row: Row | None, metric: str) -> str:
    """A cell of a Markdown table: the value and its interval; `-` for what is missing.

    Args:
        row: of a results file.
        metric: a name in `METRICS`; shares are written in percent.
    """
    if row is None or "value" not in row:
        return "-"
    if METRICS[metric].kind == "loss":
        return f"{row['value']:.2f}{bracket(row, 1, '.2f')}"
    # A client's interval is tens of points wide: decimals there would only look exact.
    return f"{100 * row['value']:.1f}{bracket(row, 100, '.1f' if row['client'] == MACRO else '.0f')}"


def narrow_cell(row: Row | None, metric: str) -> str:
    """A cell for a terminal: the value, and below it the interval to whole points."""
    if row is None or "low" not in row:
        return cell(row, metric)
    if METRICS[metric].kind == "loss":
        return f"{row['value']:.2f}\n{row['low']:.1f}-{row['high']:.1f}"
    return f"{100 * row['value']:.1f}\n{100 * row['low']:.0f}-{100 * row['high']:.0f}"


def bracket(row: Row, scale: float, form: str) -> str:
    """A row's interval with a space before it; empty where it has none.

    Args:
        row: of a results file.
        scale: what its ends are multiplied with, 100 for percent.
        form: how a number is written, as `format` takes it.
    """
    if "low" not in row or "high" not in row:
        return ""
    return f" [{format(scale * row['low'], form)}, {format(scale * row['high'], form)}]"


def difference(row: Row) -> str:
    """One paired difference in words."""
    method, baseline = (escape(ARMS.get(row[key], row[key])) for key in ("method", "baseline"))
    metric = METRICS[row["of"]]
    if "value" not in row:
        return f"{metric.short}: {method} minus {baseline}: {row.get('verdict', 'no verdict')}"
    form = f"+{metric.form}"
    ends = bracket(row, metric.scale, form)
    gap = (
        f"{format(metric.scale * row['value'], form)} {metric.gap_unit}"
        f"{', 95% interval' if ends else ', no interval'}{ends}"
    )
    test = "McNemar" if metric.kind == "share" else "randomised"
    chance = f", {test} p {_p(row['p'])}" if "p" in row else ""
    over = f", n = {row['n']}" + (f" over {row['clients']} clients" if "clients" in row else "")
    verdict = row.get("verdict", "no verdict")
    return f"{metric.short}: {method} minus {baseline}: {gap}{over}{chance}: {verdict}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"
