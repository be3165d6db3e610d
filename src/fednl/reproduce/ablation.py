"""The perplexity ablation: what each part of the memory is worth on ordinary text. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fednl.evaluation.measures import TEXT
from fednl.evaluation.rows import MACRO, Row
from fednl.reproduce import page, papers
from fednl.reproduce.comparison import Answers, Asked, asked_others, comparison_rows, with_mark, without_claims
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Line, Method, Page, Scale, Table
from fednl.reproduce.text_sets import PAPER_SETS, SMALL_SETS, TINY_SETS
from fednl.runs import Run

FULL = Method("full")
HEBBIAN = Method("hebbian", ("memory.rule=hebbian",))
# All that is trained but the gate, which stays as it starts: an equal 0.1 of every read.
NO_GATE = Method(
    "no-gate", ("federation.algorithm=shared-only", 'federation.shared=["write", "projection", "address"]')
)
NO_PROJECTION = Method("no-projection", ("memory.rank=0",))

OURS = Line("full", FULL, "federated", "FedNL")
LINES = (
    OURS,
    Line("Hebbian in place of delta", HEBBIAN, "federated", "Hebbian in place of delta"),
    Line("gate not learned", NO_GATE, "federated", "without its memory gate"),
    Line("no projection", NO_PROJECTION),
    Line("rules frozen", FULL, "public-rules"),
    Line("no memory, same window", FULL, "window-only"),
)
_METRIC = "text_nats_per_token"


def work(sitting: Sitting) -> Iterator[Page]:
    """Trains run by run, asks each, and gives the table after each."""
    found: Answers = {}
    for method in dict.fromkeys(line.method for line in LINES):
        own = [line for line in LINES if line.method == method]
        answered = sitting.answers(method, [line.arm for line in own])
        found |= {line.name: answered[line.arm] for line in own}
        yield written(sitting, {line.name: found[line.name] for line in LINES if line.name in found})


def written(sitting: Sitting, answers: Answers) -> Page:
    """The table as far as there are answers.

    Args:
        sitting: whose folder says what the runs were.
        answers: line -> how it foresaw each stretch.
    """
    config = sitting.config(FULL)
    seed, tokens = config.run.seed, config.data.tokens
    one = Asked("ablation", "ordinary text", LINES, TEXT.metrics, tokens=tokens)
    marks = {line.name: asked_others(answers, line.name, one) for line in LINES}
    rows = without_claims(comparison_rows(answers, one, seed, marks), marks)
    named = [row | {"method": with_mark(row["method"], marks[row["method"]])} for row in rows]
    ours = {line: with_mark(cell, marks[line]) for line, cell in perplexities(rows).items()}
    heading = f"perplexity, {tokens:,} tokens"
    parts = [
        page.head(sitting),
        page.beside([heading], {heading: ours}, (papers.ABLATION,), LINES),
        f"Perplexity is exp of the macro average of nats per token, its interval that of the average. {_READING}",
        page.INTERVALS,
        *page.by_client(named, _METRIC),
        *page.differences(rows),
        "## The paper",
        page.as_published(papers.ABLATION),
        "## How it was made",
        *page.runs_table(Run(sitting.out), sitting.numbers_shared(LINES), sitting.size),
        *page.setup(Run(sitting.out / FULL.name)),
    ]
    return Page("\n\n".join(parts) + "\n", {"ablation": rows})


def perplexities(rows: Sequence[Row]) -> dict[str, str]:
    """Each line's perplexity with its interval, as a cell.

    Args:
        rows: of `result_rows`, in nats per token.
    """
    macro = [row for row in rows if (row["metric"], row["client"]) == (_METRIC, MACRO)]
    return {
        row["method"]: f"{math.exp(row['value']):.2f}"
        + (f" [{math.exp(row['low']):.2f}, {math.exp(row['high']):.2f}]" if "low" in row else "")
        for row in macro
    }


_READING = (
    "Every trained line took the same steps of the same batches from fresh rules. With the gate not learned every read "
    "is added times 0.1, where the gate starts. Rules frozen are the fresh ones. The paper's lines are of PG-19 and of "
    "another model; its line without LoRA trains a set of rules that ours does not single out."
)
_ARMS = ("evaluation.arms=[]",)
TABLE = Table(
    name="ablation",
    about="The same clients and steps on ordinary text, with one part of the memory changed or left out at a time.",
    scales={
        "tiny": Scale("seconds", (*TINY_SETS, *_ARMS)),
        "small": Scale("SmolLM2-135M, four runs of 36 steps of 256 tokens", (*SMALL_SETS, *_ARMS)),
        "paper": Scale("Llama-3.2-1B (or any: --set backbone.id=...); a GPU of 48 GB", (*PAPER_SETS, *_ARMS)),
    },
    lines=lambda scale: LINES,
    work=work,
)
