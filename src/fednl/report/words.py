"""How numbers and names are written in a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def escape(text: object) -> str:
    """Makes a name safe inside a Markdown table: one line, no column break."""
    return " ".join(str(text).split()).replace("|", "\\|")


def name_only(value: object) -> object:
    """Leaves of a path its last part: the user's folders are nobody's business."""
    return Path(value).name if isinstance(value, str) else value


def percent(share: float) -> str:
    """Writes a share as a percentage without needless decimals: `25%`, `33.3%`."""
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def number(value: object) -> str:
    """Writes a whole number with thousands separated; `-` for what is missing."""
    return f"{value:,}" if isinstance(value, int) else "-"


def where(numbers: Sequence[object]) -> str:
    """Says in which rounds something happened, or in how many where they are many."""
    if len(numbers) > 3:
        return f"{len(numbers)} rounds"
    return f"round{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def megabytes(counts: Sequence[int]) -> str:
    """Writes bytes in MB (10^6 bytes), as a range where they differ; `-` where there are none."""
    if not counts:
        return "-"
    low, high = (f"{count / 1e6:.3f}" for count in (min(counts), max(counts)))
    return f"{low} MB" if low == high else f"{low} to {high} MB"


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Lays out a Markdown table, its columns padded so that it also reads as plain text.

    Args:
        head: column names; the first column is aligned left, the others right.
        body: the cells, already escaped, as many in a line as there are columns.
    """
    lines = [list(head), *map(list, body)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(head))]

    def row(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([row(lines[0]), rule, *map(row, lines[1:])])
