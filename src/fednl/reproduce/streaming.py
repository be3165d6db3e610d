"""The streaming probe: long held-out texts read token by token, the memory open and closed. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fednl.answers import STREAMS
from fednl.errors import SettingsError
from fednl.evaluation.settings import ARMS
from fednl.evaluation.statistics import LEAST_OUTCOMES
from fednl.report.cells import bracket
from fednl.report.words import markdown_table, number
from fednl.reproduce import page, papers
from fednl.reproduce.keeping import is_kept, kept
from fednl.reproduce.reading import CLOSED, FEDNL, FINE_TOKENS, OPEN, Reader
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Line, Page, Scale, Table
from fednl.reproduce.text_sets import PAPER_SETS, SMALL_SETS, TINY_SETS
from fednl.runs import Run

if TYPE_CHECKING:
    from fednl.evaluation.rows import Row
    from fednl.evaluation.streaming import StreamNats

LINES = (Line("FedNL", FEDNL, OPEN, "FedNL"), Line("the same window, no memory", FEDNL, CLOSED))
TEXTS = {"tiny": 2, "small": 16, "paper": 16}
"""How many texts are read at a scale."""
BIN_TOKENS, COLD_TOKENS = 1024, 1024
"""The coarse bins are made of the fine ones, and the first of these are the cold start."""
_LEAST_TOKENS = 2


def work(sitting: Sitting) -> Iterator[Page]:
    """Trains one run, has it read text after text in both arms, and gives the tables after each text.

    What was read stays in the run's own folder: it is of these rules and of no others. Each line names its text by
    hash, and a text that is another now is read again.

    Raises:
        SettingsError: a length that leaves nothing to foresee.
    """
    if (least := min(sitting.lengths)) < _LEAST_TOKENS:
        raise SettingsError(
            f"--lengths {least}: the first token of a text has nothing before it, so that there is none to foresee; "
            f"name {_LEAST_TOKENS} tokens or more."
        )
    run = sitting.run(FEDNL)
    read: dict[int, Mapping[str, Sequence[StreamNats]]] = {}
    for tokens in dict.fromkeys(sitting.lengths):
        texts = TEXTS[sitting.scale]
        asked = [(arm, text) for text in range(texts) for arm in (OPEN, CLOSED)]
        reader = Reader(sitting, run, tokens, texts)
        path = run.path / "results" / f"{STREAMS}{tokens}.jsonl"
        # Whether a text is still the one that was read is looked at before another is read beside it.
        named = None if is_kept(path, asked) else reader.named()
        for count in range(1, texts + 1):
            found = kept(path, asked[: 2 * count], reader.read, named=named)
            read[tokens] = _by_arm(found)
            yield written(sitting, read)


def _by_arm(found: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, list[StreamNats]]:
    from fednl.evaluation.streaming import StreamNats

    arms: dict[str, list[StreamNats]] = {}
    for (arm, _), one in found.items():
        arms.setdefault(arm, []).append(StreamNats(**{key: tuple(value) for key, value in one.items()}))
    return arms


def written(sitting: Sitting, read: Mapping[int, Mapping[str, Sequence[StreamNats]]]) -> Page:
    """The tables of the texts read so far, length by length on one page.

    Args:
        sitting: whose folder says what the run was.
        read: tokens a text -> arm -> how it read each text, in fine bins.
    """
    parts, ours = [], {}
    measured: dict[str, Sequence[Row]] = {}
    for tokens, arms in read.items():
        rows, cold = _rows(arms, sitting.config(FEDNL).run.seed)
        measured |= {f"streaming-{tokens}": rows, f"cold-start-{tokens}": cold}
        where = f", {tokens:,} tokens" if len(sitting.lengths) > 1 else ""
        ours[f"change from the first {BIN_TOKENS:,} tokens to the last, %{where}"] = _changes(rows)
        parts += [
            f"n = {len(arms[OPEN])} of {TEXTS[sitting.scale]} held-out texts of {tokens:,} tokens; every token but the "
            f"first is scored once. {_INTERVALS}",
            f"## Bins of {BIN_TOKENS:,} tokens{where} ({page.MEASURED})",
            bins_table(rows),
            summary(rows),
            f"## Cold start: bins of {FINE_TOKENS} tokens{where} ({page.MEASURED})",
            bins_table(cold),
            summary(cold),
        ]
    parts = [
        page.head(sitting),
        page.beside(list(ours), ours, (papers.STREAMING,), LINES),
        *parts,
        "## The paper",
        page.as_published(papers.STREAMING),
        "## How it was made",
        *page.runs_table(Run(sitting.out), sitting.numbers_shared(LINES), sitting.size),
        *page.setup(Run(sitting.out / FEDNL.name)),
    ]
    return Page("\n\n".join(parts) + "\n", measured)


def _rows(arms: Mapping[str, Sequence[StreamNats]], seed: int) -> tuple[list[Row], list[Row]]:
    """The rows of coarse bins, and those of the fine ones that are the cold start."""
    from fednl.evaluation.streaming import coarser, streaming_rows

    whole = {arm: [coarser(one, BIN_TOKENS // FINE_TOKENS) for one in read] for arm, read in arms.items()}
    fine = streaming_rows(arms, seed=seed, bin_tokens=FINE_TOKENS)
    cold = [row for row in fine if row["from_token"] < COLD_TOKENS]
    return streaming_rows(whole, seed=seed, bin_tokens=BIN_TOKENS), cold


def _changes(rows: Sequence[Row]) -> dict[str, str]:
    """Each line's cell of how its last bin differs from its first; of one bin there is no change."""
    last = max(row["bin"] for row in rows)
    found = [row for row in rows if (row["metric"], row["bin"]) == ("change_percent", last)]
    return {_line(row): _shown(row, "+.1f") for row in found if last}


_INTERVALS = (
    "In brackets: 95% intervals over the texts (bootstrap), of differences paired by text, from three texts on that "
    "vary. They do not cover another training seed."
)


_SIZES = {"state_bytes": "memory state, bytes", "kv_bytes": "keys and values, bytes"}


def bins_table(rows: Sequence[Row]) -> str:
    """A line a bin: raw nats per token of both arms, their paired difference, and the memory arm's cache in parts."""
    cells = {(row["method"], row["metric"], row["bin"]): row for row in rows}
    body = []
    for place in sorted({row["bin"] for row in rows}):
        gap = cells[OPEN, "difference", place]
        nats = [cells[arm, "nats_per_token", place] for arm in (CLOSED, OPEN)]
        body.append(
            [
                number(gap["from_token"]),
                *(_shown(row, ".3f") for row in nats),
                _shown(gap, "+.3f"),
                gap.get("verdict", "no verdict"),
                *(number(nats[1][key]) for key in _SIZES),
            ]
        )
    heads = ["from token", *(f"{ARMS[arm]}, nats/token" for arm in (CLOSED, OPEN)), "difference", "memory is"]
    return markdown_table([*heads, *_SIZES.values()], body)


def summary(rows: Sequence[Row]) -> str:
    """In how many bins the memory is better or worse than none, and whether its cache grew."""
    verdicts = [row.get("verdict") for row in rows if row["metric"] == "difference"]
    sizes = [
        [number(row[key]) for key in _SIZES]
        for row in rows
        if (row["method"], row["metric"]) == (OPEN, "nats_per_token")
    ]
    told = (
        f"With memory the text is read better in {verdicts.count('better')} and worse in {verdicts.count('worse')} of "
        f"{len(verdicts)} bins, by intervals without 0."
    )
    if not any(verdicts):
        texts = min((row["n"] for row in rows if row["metric"] == "difference"), default=0)
        told = (
            f"In no bin is the text read better or worse with memory, as none has an interval: that takes "
            f"{LEAST_OUTCOMES} texts or more that vary, and {texts} {'is' if texts == 1 else 'are'} read."
        )
    return (
        f"{told} Its cache holds {' + '.join(sizes[0])} bytes (memory state + "
        f"keys and values) after the first bin and {' + '.join(sizes[-1])} after the last."
    )


def _line(row: Row) -> str:
    return next(line.name for line in LINES if line.arm == row["method"])


def _shown(row: Row, form: str) -> str:
    return f"{format(row['value'], form)}{bracket(row, 1, form)}"


TABLE = Table(
    name="streaming",
    about="Clients teach the rules on their own news; texts of domains that none of them holds are then read from "
    "end to end at constant cost, with the memory open and closed.",
    scales={
        "tiny": Scale("seconds", TINY_SETS, (1_100,)),
        "small": Scale("SmolLM2-135M, 36 steps of 256 tokens; 16 texts of 16,384 tokens twice", SMALL_SETS, (16_384,)),
        "paper": Scale("Llama-3.2-1B (or any: --set backbone.id=...); a GPU of 48 GB", PAPER_SETS, (16_384,)),
    },
    lines=lambda scale: LINES,
    work=work,
)
