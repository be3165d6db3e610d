"""The needle table: seven unlike clients, four choices, one memory of constant size. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from fednl.evaluation.closing import share_closed
from fednl.evaluation.measures import METRICS, NEEDLES
from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.rows import MACRO, Row, result_rows
from fednl.report.cells import cell
from fednl.reproduce import page, papers
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Line, Method, Page, Scale, Table
from fednl.runs import Run

# A LoRA in the place of memory; the window, where there is one, is the memory's.
_LORA = (
    "memory.layers=none",
    "memory.start=fresh",
    "lora.rank=8",
    'lora.targets="q_proj,v_proj"',
    "federation.shared=lora",
)

FEDNL = Method("fednl")
WINDOW_LORA = Method("fedavg-lora-window", _LORA)
FULL_LORA = Method("fedavg-lora-full", (*_LORA, "memory.window-tokens=0"))
FEDALA = Method("fedala-window", (*_LORA, "federation.algorithm=fedala", "fedala.steps=2", "fedala.most-passes=3"))
FFA = Method("ffa-lora-window", (*_LORA, "federation.algorithm=ffa-lora"))

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
"""Beyond so many tokens there are three lines, and so many questions a client."""
_GROWS = ("full attention",)
_SHARED_OUT = "candidates", "nats_per_token"


def lines_at(tokens: int) -> tuple[Line, ...]:
    """The lines that are measured at a prompt length."""
    return LINES if tokens <= LONG_TOKENS else (OURS, FLOOR, CEILING)


def changed_at(tokens: int) -> list[str]:
    """The settings under which a run answers at a prompt length."""
    longer = [f"data.test={LONG_TEST}", "evaluation.batch=1"] if tokens > LONG_TOKENS else []
    return [f"data.tokens={tokens}", *longer]


def work(sitting: Sitting) -> Iterator[Page]:
    """Trains run by run, measures each at every length, and gives the table after each."""
    lines = [line for line in LINES if any(line in lines_at(tokens) for tokens in sitting.lengths)]
    found: dict[int, dict[str, list[Outcome]]] = {tokens: {} for tokens in sitting.lengths}
    # In the table's order, so that floor, FedNL and ceiling are there first.
    for method, group in groupby(lines, key=lambda line: line.method):
        own = list(group)
        for tokens in sitting.lengths:
            asked = [line for line in own if line in lines_at(tokens)]
            answered = sitting.answers(method, [line.arm for line in asked], changed_at(tokens)) if asked else {}
            found[tokens] |= {line.name: answered[line.arm] for line in asked}
        yield written(sitting, {tokens: in_order(answers) for tokens, answers in found.items()})


def in_order(answers: Mapping[str, list[Outcome]]) -> dict[str, list[Outcome]]:
    """The lines that have answers, in the table's order."""
    return {line.name: answers[line.name] for line in LINES if line.name in answers}


def written(sitting: Sitting, found: Mapping[int, Mapping[str, Sequence[Outcome]]]) -> Page:
    """The table as far as there are answers.

    Args:
        sitting: whose folder says what the runs were.
        found: prompt tokens -> line -> its answers.
    """
    out, seed = Run(sitting.out), sitting.config(FEDNL).run.seed
    measured = {tokens: rows_of(answers, tokens, seed) for tokens, answers in found.items()}
    reach = context_tokens(out)
    parts = [page.head(f"needles, scale {sitting.scale}", TABLE.about, sitting.command)]
    names = {tokens: f"right of four, %, {tokens:,} tokens" for tokens in found}
    ours = {
        names[tokens]: {
            line: shown + _outside(line, tokens, reach) for line, shown in page.macro_cells(rows, "candidates").items()
        }
        for tokens, rows in measured.items()
    }
    parts.append(page.beside(list(names.values()), ours, papers.NEEDLES, LINES))
    parts += [_reading(), page.INTERVALS]
    for tokens, rows in measured.items():
        where = f", {tokens:,} tokens"
        parts += [f"## {tokens:,} tokens", *closed_lines(rows, tokens, reach)]
        for metric in NEEDLES.metrics:
            parts += page.by_client(rows, metric, where)
        parts += page.differences(rows, where)
    parts += ["## The paper", page.as_published(papers.NEEDLES), "## How it was made"]
    parts += page.runs_table(out, dict.fromkeys(line.method for line in LINES))
    parts += page.setup(Run(sitting.out / FEDNL.name))
    return Page("\n\n".join(parts) + "\n", {f"needles-{tokens}": rows for tokens, rows in measured.items()})


def rows_of(answers: Mapping[str, Sequence[Outcome]], tokens: int, seed: int) -> list[Row]:
    """Rows of every line, of the first against each other, and of the way from floor to ceiling that it closes."""
    pairs = [(OURS.name, name) for name in answers if name != OURS.name]
    rows = result_rows(answers, seed=seed, tokens=tokens, pairs=pairs)
    if not {OURS.name, FLOOR.name, CEILING.name} <= answers.keys():
        return rows
    for metric in _SHARED_OUT:
        values = [_by_client(answers[line.name], METRICS[metric].field) for line in (OURS, FLOOR, CEILING)]
        row: Row = {"method": OURS.name, "client": MACRO, "metric": "share_closed", "of": metric, "tokens": tokens}
        row |= {"floor": FLOOR.name, "ceiling": CEILING.name, "seed": seed}
        share = share_closed(values[0], values[1], values[2], seed)
        # Without a value: the floor is not told from the ceiling.
        rows.append(row | (vars(share) if share else {}))
    return rows


def closed_lines(rows: Sequence[Row], tokens: int, reach: int | None) -> list[str]:
    """What share of the way from floor to ceiling FedNL closes, in words."""
    shown = []
    for row in (row for row in rows if row["metric"] == "share_closed"):
        what = METRICS[row["of"]].short
        if _outside(CEILING.name, tokens, reach):
            shown.append(f"- {what}: no share, as the ceiling is outside the backbone's trained range")
        elif "value" not in row:
            shown.append(f"- {what}: no share, as floor and ceiling are not told apart")
        else:
            ends = cell({**row, "client": MACRO}, "candidates")
            shown.append(f"- {what}: {ends}% of the way from floor to ceiling, n = {row['n']}")
    return [f"### Closed by FedNL ({page.MEASURED})", "\n".join(shown)] if shown else []


def context_tokens(out: Run) -> int | None:
    """How far the backbone's own positions reach, as the first run says; None where it does not."""
    run = Run(out.path / FEDNL.name)
    known = run.read_json("partition.json") if (run.path / "partition.json").exists() else {}
    return known.get("context_tokens")


def _outside(line: str, tokens: int, reach: int | None) -> str:
    """What is said of full attention beyond the text that the backbone was trained on."""
    grows = any(word in line for word in _GROWS)
    return " (outside trained range)" if grows and reach is not None and tokens > reach else ""


def _by_client(outcomes: Sequence[Outcome], name: str) -> dict[str, list[float]]:
    clients: dict[str, list[float]] = {}
    for one in sorted(outcomes, key=lambda one: (one.client, one.index)):
        clients.setdefault(one.client, []).append(float(getattr(one, name)))
    return clients


def _reading() -> str:
    return (
        "Every trained line took the same number of steps of the same batches. The floor, FedALA and FFA-LoRA read "
        "through FedNL's window, at its constant cost; full attention keeps every token, and its cache grows with the "
        "text. The paper states no window; its FedAvg stands beside our full attention."
    )


_TASK = ("data.task=needles", "data.events=4", "data.questions=4", "evaluation.arms=[]")
_LORA_METHODS = (WINDOW_LORA, FULL_LORA, FEDALA, FFA)

_TINY = Scale(
    about="seconds",
    sets=(
        *_TASK,
        "data.tokens=430",
        "data.clients=2",
        "data.events=2",
        "data.questions=1",
        "data.train=4",
        "data.validation=0",
        "data.test=2",
        'memory.layers="last:1"',
        "memory.rank=2",
        "memory.window-tokens=130",
        "training.rounds=1",
        "training.local-steps=1",
        "training.batch=2",
    ),
    lengths=(430,),
)
_SMALL = Scale(
    about="SmolLM2-135M from the public rules, trained at 224 tokens, asked at 1,024 and 2,048; 15 questions a client",
    sets=(
        *_TASK,
        "backbone.id=smollm2-135m",
        "backbone.dtype=auto",
        "data.tokens=224",
        "data.train=750",
        "data.validation=0",
        "data.test=15",
        'memory.layers="14-23"',
        "memory.rank=8",
        "memory.window-tokens=64",
        "memory.start=public",
        "training.rounds=6",
        "training.local-steps=6",
        "training.batch=2",
        "training.local-lr=1e-2",
        "federation.quorum=5",
        "federation.parallel-clients=2",
        "evaluation.batch=4",
    ),
    lengths=(1024, 2048),
    own={method.name: ("training.local-lr=3e-3",) for method in _LORA_METHODS},
)
_PAPER = Scale(
    about="Llama-3.2-1B (or any: --set backbone.id=...), the paper's counts, LoRA of rank 16 on all linears, two "
    "rounds of one epoch; a GPU of 48 GB",
    sets=(
        *_TASK,
        "backbone.id=meta-llama/Llama-3.2-1B",
        "backbone.dtype=bfloat16",
        "data.tokens=1024",
        "data.train=750",
        "data.validation=15",
        "data.test=15",
        'memory.layers="last:8"',
        "memory.rank=8",
        "memory.window-tokens=256",
        "memory.start=fresh",
        "training.rounds=2",
        "training.local-steps=188",
        "training.batch=4",
        "training.local-lr=3e-3",
        "federation.quorum=5",
        "evaluation.batch=4",
    ),
    lengths=(1024, 2048, 4096),
    own={
        method.name: ("lora.rank=16", "lora.alpha=32", "lora.targets=all-linear", "training.local-lr=3e-4")
        for method in _LORA_METHODS
    },
)
TABLE = Table(
    name="needles",
    about="Seven unlike clients each hide their own kind of facts in filler and ask for one of them, further back than "
    "the window reaches.",
    scales={"tiny": _TINY, "small": _SMALL, "paper": _PAPER},
    work=work,
    published=(papers.NEEDLES,),
)
