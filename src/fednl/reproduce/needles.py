"""The needle table: seven unlike clients, four choices, one memory of constant size. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from fednl.evaluation.closing import share_closed
from fednl.evaluation.measures import METRICS, NEEDLES
from fednl.evaluation.outcomes import values_by_client
from fednl.evaluation.rows import MACRO, Row
from fednl.evaluation.statistics import told_ends
from fednl.report.cells import cell
from fednl.reproduce import page, papers, settings
from fednl.reproduce.comparison import (
    OTHERS,
    Answers,
    Asked,
    Shown,
    answered,
    comparison_rows,
    written,
)
from fednl.reproduce.given import ONLY_ASKED, key_of
from fednl.reproduce.keeping import questions
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Line, Method, Page, Scale, Table
from fednl.runs import Run

_SIZE = settings.LORA_SIZE
FEDNL = Method("fednl", settings.FEDNL)
WINDOW_LORA = Method("fedavg-lora-window", settings.FEDAVG_LORA, _SIZE)
FULL_LORA = Method("fedavg-lora-full", (*settings.FEDAVG_LORA, settings.FULL), _SIZE)
FEDALA = Method("fedala-window", (*settings.LORA, "federation.algorithm=fedala"), (*_SIZE, *settings.FEDALA_PASSES))
FFA = Method("ffa-lora-window", (*settings.LORA, "federation.algorithm=ffa-lora"), _SIZE)

OURS = Line("FedNL", FEDNL, "federated", "FedNL")
FLOOR = Line("FedAvg-LoRA, same window (floor)", WINDOW_LORA)
CEILING = Line("FedAvg-LoRA, full attention (ceiling)", FULL_LORA, "federated", "FedAvg")
LINES = (
    OURS,
    FLOOR,
    CEILING,
    Line("FedALA, same window", FEDALA, "federated", "FedALA"),
    Line("FFA-LoRA, same window", FFA, "federated", "FFA-LoRA"),
    Line("window only, untrained", FEDNL, "window-only"),
    Line("full attention, untrained", FEDNL, "full-attention"),
)
LONG_TOKENS, LONG_TEST = 2048, 5
"""Beyond so many tokens there are three lines, and so many questions a client where none are given."""
_GROWS = ("full attention",)
_CLOSED = "candidates", "nats_per_token"


def lines_at(tokens: int, facts: int | None = None) -> tuple[Line, ...]:
    """The lines that are measured at a prompt length, and at another number of facts than the scale's."""
    return LINES if tokens <= LONG_TOKENS and facts is None else (OURS, FLOOR, CEILING)


def changed_at(tokens: int, facts: int | None = None, given: Sequence[str] = ()) -> list[str]:
    """The settings under which a run answers at a prompt length and another number of facts than the scale's.

    Args:
        tokens: prompt length.
        facts: how many a prompt hides; None for the scale's.
        given: settings from the command line: so many questions at every length, however many the runs have.
    """
    own = [one for one in given if key_of(one) in ONLY_ASKED]
    fewer = (f"data.test={LONG_TEST}", "evaluation.batch=1") if tokens > LONG_TOKENS else ()
    longer = [one for one in fewer if key_of(one) not in map(key_of, own)]
    harder = [f"data.events={facts}"] if facts is not None else []
    return [f"data.tokens={tokens}", *harder, *longer, *own]


def asked_at(tokens: int, facts: int | None = None, given: Sequence[str] = (), answer: str = "candidates") -> Asked:
    """The questions of a prompt length; with `facts` so many of the same kind, one of which is asked for."""
    name, title = f"needles-{tokens}", f"{tokens:,} tokens"
    if facts is not None:
        name, title = f"{name}-facts-{facts}", f"{title}, {facts} facts"
    changed = tuple(changed_at(tokens, facts, given))
    return Asked(name, title, lines_at(tokens, facts), NEEDLES.metrics_of(answer), changed, tokens)


def work(sitting: Sitting) -> Iterator[Page]:
    """Trains run by run, measures each at every length, and gives the table after each."""
    answer = sitting.config(FEDNL).evaluation.answer
    asked = [
        asked_at(tokens, facts, sitting.given, answer)
        for facts in sitting.asked_facts or (None,)
        for tokens in sitting.lengths
    ]
    for found in answered(sitting, asked):
        mark = partial(_why_not, out=sitting.out, reach=context_tokens(Run(sitting.out)))
        shown = Shown((papers.NEEDLES,), _READING, mark=mark, more=closed_lines, rows=rows_of)
        yield written(sitting, asked, found, shown)


def rows_of(answers: Answers, one: Asked, seed: int, marks: Mapping[str, str]) -> list[Row]:
    """Rows of every line, of the first against each other, and of the way from floor to ceiling that it closes.

    Args:
        answers: line -> its answers.
        one: the questions.
        seed: the runs' seed.
        marks: line -> why its numbers do not count; empty where they do.
    """
    rows = comparison_rows(answers, one, seed, marks)
    if not {OURS.name, FLOOR.name, CEILING.name} <= answers.keys():
        return rows
    for metric in _CLOSED:
        row: Row = {"method": OURS.name, "client": MACRO, "metric": "share_closed", "of": metric}
        row |= {} if one.tokens is None else {"tokens": one.tokens}
        row |= {"floor": FLOOR.name, "ceiling": CEILING.name, "seed": seed}
        ends = (CEILING.name, FLOOR.name)
        if why := next(filter(None, (marks.get(end) for end in ends)), ""):
            rows.append(row | {"note": why})
            continue
        values = [values_by_client(answers[line.name], METRICS[metric].field) for line in (OURS, FLOOR, CEILING)]
        share = share_closed(values[0], values[1], values[2], seed, shares=METRICS[metric].kind == "share")
        told = {"why": share} if isinstance(share, str) else {"value": share.value, "n": share.n, **told_ends(share)}
        rows.append(row | told)
    return rows


def closed_lines(rows: Sequence[Row], one: Asked) -> list[str]:
    """What share of the way from floor to ceiling FedNL closes, in words."""
    shown = []
    for row in (row for row in rows if row["metric"] == "share_closed"):
        what = METRICS[row["of"]].short
        if "note" in row:
            shown.append(f"- {what}: no share, as floor or ceiling does not count ({row['note']})")
        elif "value" not in row:
            shown.append(f"- {what}: no share, as {row['why']}")
        else:
            told = cell({**row, "client": MACRO}, "candidates")
            shown.append(f"- {what}: {told}% of the way from floor to ceiling, n = {row['n']}{_without(row)}")
    return [f"### Closed by FedNL ({page.MEASURED})", "\n".join(shown)] if shown else []


def _without(row: Row) -> str:
    """Says why a share has no interval."""
    if "low" in row:
        return ""
    end = {0.0: "the floor", 1.0: "the ceiling"}.get(row["value"])
    alike = f"FedNL's outcomes are those of {end} at every question" if end else "it is the same whatever is drawn"
    return f"; no interval, as {alike}: that is no certainty"


def context_tokens(out: Run) -> int | None:
    """How far the backbone's own positions reach, as the first run says; None where it does not."""
    run = Run(out.path / FEDNL.name)
    known = run.read_json("partition.json") if (run.path / "partition.json").exists() else {}
    return known.get("context_tokens")


def _why_not(line: str, one: Asked, out: Path, reach: int | None) -> str:
    """Why a line's numbers do not count: full attention beyond its range, or other prompts than the first line's."""
    method = next(found.method for found in one.lines if found.name == line)
    ours, theirs = (questions(Run(out / name), one.changed) for name in (one.lines[0].method.name, method.name))
    # Facts stand outside the window: in a short prompt another window moves them.
    other = OTHERS if ours and theirs and ours != theirs else ""
    return other or _outside(line, one.tokens, reach)


def _outside(line: str, tokens: int | None, reach: int | None) -> str:
    """What is said of full attention beyond the text that the backbone was trained on."""
    grows = any(word in line for word in _GROWS)
    far = reach is not None and tokens is not None and tokens > reach
    return "outside trained range" if grows and far else ""


_READING = (
    "Every trained line took the same number of steps of the same batches. The floor, FedALA and FFA-LoRA read "
    "through FedNL's window, at its constant cost; full attention keeps every token, and its cache grows with the "
    "text. The paper states no window; its FedAvg stands beside our full attention."
)
_TASK = ("data.task=needles", "evaluation.arms=[]")
_LORA_METHODS = (WINDOW_LORA, FULL_LORA, FEDALA, FFA)

_TINY = Scale(about="seconds", sets=(*_TASK, *settings.TINY_NEEDLES), lengths=(430,), facts=(2,))
_SMALL = Scale(
    about="SmolLM2-135M from the public rules, trained at 320 tokens, asked at 1,024 and 2,048; 15 questions a client",
    sets=(
        *_TASK,
        *settings.SMOLLM2,
        "data.tokens=320",
        "data.questions=4",
        "data.train=750",
        "data.validation=0",
        "data.test=15",
        "memory.window-tokens=64",
        "training.rounds=6",
        "training.local-steps=10",
        "training.batch=1",
        "training.local-lr=1e-2",
        "federation.quorum=5",
        "evaluation.batch=4",
    ),
    lengths=(1024, 2048),
    facts=(4,),
    own={method.name: ("training.local-lr=3e-3",) for method in _LORA_METHODS},
)
_PAPER = Scale(
    about="Llama-3.2-1B (or any: --set backbone.id=...), the paper's counts, LoRA of rank 16 on all linears, two "
    "rounds of one epoch; a GPU of 48 GB",
    sets=(
        *_TASK,
        *settings.LLAMA_1B,
        "data.tokens=1024",
        "data.questions=4",
        "data.train=750",
        "data.validation=0",
        "data.test=15",
        "training.rounds=2",
        "training.local-steps=188",
        "training.local-lr=3e-3",
        "federation.quorum=5",
        "evaluation.batch=4",
    ),
    lengths=(1024, 2048, 4096),
    facts=(4,),
    own={method.name: settings.paper_lora(16, "3e-4") for method in _LORA_METHODS},
)
TABLE = Table(
    name="needles",
    about="Seven unlike clients each hide their own kind of facts in filler and ask for one of them, further back than "
    "the window reaches.",
    scales={"tiny": _TINY, "small": _SMALL, "paper": _PAPER},
    lines=lambda scale: LINES,
    work=work,
    asks_others=True,
)
