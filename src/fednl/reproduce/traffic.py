"""What crosses the network, as serialised, of each method: nothing is answered. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fednl.reproduce import page, papers, settings
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Line, Method, Page, Scale, Table
from fednl.runs import Run

_HALF = ("traffic.up=float16", "traffic.down=float16")
_CONTEXT = (
    "federation.adapters=context-vectors",
    "federation.algorithm=ifed-icl",
    "federation.shared=context",
    "data.task=classification",
)
_SHORT = ("classification.long-texts=cut", "classification.demonstrations=1", "data.tokens=32", "data.train=2")
_MEMORY = (*settings.FEDNL, "federation.shared=memory")
_ALL_LINEARS = settings.paper_lora(16, "3e-4")
THETA = Method("fednl-theta", (*settings.FEDNL, "federation.shared=theta"))
LINES = (
    Line("FedNL, theta (write, gate, projection, address)", THETA),
    Line("FedNL, memory (write, gate)", Method("fednl-memory", _MEMORY), published="FedNL"),
    Line("FedNL, memory, float16", Method("fednl-memory-half", (*_MEMORY, *_HALF)), published="FedNL"),
    Line(
        "FedAvg-LoRA, rank 16 on all linears, float16",
        Method("fedavg-lora-half", (*settings.FEDAVG_LORA, *_ALL_LINEARS, *_HALF)),
        published="FedAvg",
    ),
    Line(
        "FFA-LoRA, rank 16 on all linears, float16",
        Method("ffa-lora-half", (*settings.LORA, *_ALL_LINEARS, "federation.algorithm=ffa-lora", *_HALF)),
    ),
    Line(
        "FedAvg-LoRA, rank 8 on q and v",
        Method("fedavg-lora-qv", (*settings.FEDAVG_LORA, *settings.LORA_SIZE)),
        published="FedAvg-LoRA",
    ),
    Line("IFed-ICL, coefficients", Method("ifed-icl", _CONTEXT, _SHORT), published="IFed-ICL"),
)
_READING = (
    "Bytes are those of the messages as serialised, container and checksums included, of one client in one round; "
    "IFed-ICL's first round carries its context vectors, its further ones the coefficients. Nothing is answered in "
    "this table, so no ratio stands in it: what a set of rules is worth is in the tables of needles and ifed-icl."
)


def work(sitting: Sitting) -> Iterator[Page]:
    """Takes a step a round with every method, and gives the table after each."""
    rows: list[dict[str, Any]] = []
    for line in LINES:
        run = sitting.run(line.method)
        rows += message_rows(line.name, run.read_jsonl("rounds.jsonl"))
        yield written(sitting, rows)


def message_rows(name: str, rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Makes a row of a line's first round, of its last one where there are two, and of all together.

    In each n messages are counted.

    Args:
        name: the line.
        rounds: as `rounds.jsonl` has them.
    """
    made = []
    for metric in ("up_bytes", "down_bytes"):
        sizes = [[one[metric] for one in row.get("clients", []) if metric in one] for row in rounds]
        # Of one round there is no further one: IFed-ICL's first is not what its others cost.
        for when, part in (("first round", sizes[0]), ("last round", sizes[-1] if len(sizes) > 1 else [])):
            if part:
                row: dict[str, Any] = {"method": name, "metric": metric, "when": when, "n": len(part)}
                made.append(row | {"value": sum(part) / len(part), "least": min(part), "most": max(part)})
        whole = [size for part in sizes for size in part]
        made.append({"method": name, "metric": metric, "when": "in all", "n": len(whole), "value": sum(whole)})
    return made


def written(sitting: Sitting, rows: Sequence[Mapping[str, Any]]) -> Page:
    """The table as far as it is."""
    found = {(row["method"], row["metric"], row["when"]): row for row in rows}
    columns = [
        ("up_bytes", "first round"),
        ("up_bytes", "last round"),
        ("down_bytes", "last round"),
        ("up_bytes", "in all"),
    ]
    names = ["kB up, first round", "kB up, last round", "kB down, last round", "kB up, all messages"]
    ours = {
        name: {line.name: _kilobytes(found[key]) for line in LINES if (key := (line.name, *column)) in found}
        for name, column in zip(names, columns, strict=True)
    }
    published = (papers.TRAFFIC_FEDNL, papers.TRAFFIC_IFED)
    parts = [page.head(sitting)]
    parts += [page.beside(names, ours, published, LINES), _READING, "kB: 1,000 bytes."]
    parts += ["## What the papers print", *map(page.as_published, published), "## How it was made"]
    parts += page.runs_table(Run(sitting.out), sitting.numbers_shared(LINES), sitting.size)
    parts += page.setup(Run(sitting.out / THETA.name))
    return Page("\n\n".join(parts) + "\n", {"traffic": rows})


def _kilobytes(row: Mapping[str, Any]) -> str:
    return f"{row['value'] / 1000:,.3f} (n = {row['n']})"


_TASK = (
    "evaluation.arms=[]",
    "data.validation=0",
    "data.test=0",
    "training.rounds=2",
    "training.local-steps=1",
    "training.batch=1",
)
_REAL = ("data.train=1", "data.tokens=144", "memory.window-tokens=36")
TABLE = Table(
    name="traffic",
    about="How many bytes a client sends and receives in a round, by method.",
    scales={
        "tiny": Scale(
            about="seconds",
            sets=(*settings.TINY_NEEDLES, *_TASK),
            own={"ifed-icl": ("classification.source={folder}/texts.jsonl", "data.tokens=60", "data.test=2")},
        ),
        "small": Scale(
            about="SmolLM2-135M, seven clients, two rounds of one step; minutes",
            sets=(*settings.SMOLLM2, *_TASK, *_REAL),
            own={"ifed-icl": ("data.clients=7", "data.test=1")},
        ),
        "paper": Scale(
            about="Llama-3.2-1B (or any: --set backbone.id=...), seven clients, two rounds of one step",
            sets=(*settings.LLAMA_1B, *_TASK, *_REAL),
            own={"ifed-icl": ("data.clients=7", "data.test=1")},
        ),
    },
    lines=lambda scale: LINES,
    work=work,
)
