"""A client that nobody trained on: shared rules, fixed, against what it could have learned alone. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from fednl.data.needle_clients import CLIENTS
from fednl.evaluation.measures import NEEDLES, TEXT, Measure
from fednl.reproduce import settings
from fednl.reproduce.comparison import Answers, Asked, Shown, answered, written
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Line, Method, Page, Scale, Table

OURS = "FedNL rules of the other clients"
_NEWS = ("business", "entertainment", "sports", "politics", "tech")
_READING = (
    "Each client in turn is left out of the whole training, then answers with the rules fixed: its own kind of fact in "
    "the needles, its own domain in the texts. Its own rules are those that it trains alone, with as many steps as a "
    "client takes in the federation. Where the gate is closed only the window reads. Before training the rules are the "
    "public ones (needles at the scale small) or fresh. The paper claims that memory adapts for clients it has not "
    "seen, and prints no table of it: no column stands beside ours."
)


@dataclass(frozen=True)
class Federation:
    """Clients of whom some are left out, one at a time.

    Attributes:
        name: of its results file.
        title: of its column.
        clients: all of them.
        left_out: who is left out in turn.
        measure: what is measured of its task.
        sets: what makes its task.
        usual: its further settings over those of the scale.
        lora: those of its LoRA over these.
    """

    name: str
    title: str
    clients: tuple[str, ...]
    left_out: tuple[str, ...]
    measure: Measure
    sets: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()


def _needles(clients: tuple[str, ...], left_out: tuple[str, ...], lora: tuple[str, ...] = ()) -> Federation:
    return Federation("unseen", "needles", clients, left_out, NEEDLES, lora=lora)


def _texts(
    sources: tuple[str, ...], left_out: tuple[str, ...], usual: tuple[str, ...], lora: tuple[str, ...]
) -> Federation:
    names = tuple(PurePath(source).stem for source in sources)
    own = ("data.task=text", f"text.sources={json.dumps(sources)}", f"data.clients={len(sources)}")
    return Federation("unseen-text", "texts", names, left_out, TEXT, own, usual, lora)


_SLOW = ("training.local-lr=3e-3",)
_PAPER_LORA = settings.paper_lora(16, "3e-4")
_FRESH = ("memory.rule=gated-delta", "memory.start=fresh", "federation.quorum=1")
_BBC = tuple(f"bbc-news/{name}" for name in _NEWS)
FEDERATIONS: Mapping[str, tuple[Federation, ...]] = {
    "tiny": (
        _needles(("passkey", "uuid-code"), ("passkey", "uuid-code")),
        _texts(("{folder}/river.txt", "{folder}/market.txt"), ("market",), ("data.tokens=40",), ()),
    ),
    "small": (
        _needles(tuple(CLIENTS), ("passkey", "multi-value"), _SLOW),
        _texts(
            _BBC,
            ("politics", "tech"),
            (*_FRESH, 'memory.layers="8,9,14-23"', "memory.window-tokens=64", "data.tokens=256", "data.test=12"),
            _SLOW,
        ),
    ),
    "paper": (
        _needles(tuple(CLIENTS), tuple(CLIENTS), _PAPER_LORA),
        _texts(_BBC, _NEWS, (*_FRESH, "data.tokens=2048"), _PAPER_LORA),
    ),
}
"""By scale: needle clients, the first and the last of the seven or each, and texts, two domains or each."""


def lines_of(federation: Federation, client: str) -> tuple[Line, ...]:
    """The lines of one client that is left out."""
    hold_out, others = (_held_out([client]), _held_out([one for one in federation.clients if one != client]))
    usual, size = federation.usual, (*federation.usual, *settings.LORA_SIZE, *federation.lora)
    memory = Method(f"fednl-without-{client}", (*federation.sets, *settings.FEDNL, hold_out), usual)
    lora = Method(f"lora-without-{client}", (*federation.sets, *settings.FEDAVG_LORA, hold_out), size)
    alone = (*federation.sets, others, "lora.rank=0", "federation.algorithm=local-only", "federation.quorum=1")
    return (
        Line(OURS, memory),
        Line("gate closed (window only)", memory, "window-only"),
        Line("rules before training", memory, "public-rules"),
        Line("its own rules, trained alone", Method(f"own-rules-of-{client}", alone, usual)),
        Line("FedAvg-LoRA of the other clients, same window", lora),
    )


def lines_at(scale: str) -> list[Line]:
    """All lines of a scale."""
    return [line for one in FEDERATIONS[scale] for client in one.left_out for line in lines_of(one, client)]


def _held_out(clients: Sequence[str]) -> str:
    return f"data.hold-out-clients={json.dumps(list(clients))}"


def asked_of(federation: Federation, answer: str = "candidates") -> list[Asked]:
    """The questions of every client that is left out, in turn; `answer` is the form of the answers."""
    metrics = federation.measure.metrics_of(answer)
    return [
        Asked(client, client, lines_of(federation, client), metrics, (f'evaluation.clients=["{client}"]',))
        for client in federation.left_out
    ]


def work(sitting: Sitting) -> Iterator[Page]:
    """Trains without each client in turn, asks it, and gives the table after each step."""
    federations = FEDERATIONS[sitting.scale]
    answer = sitting.config(sitting.methods[0]).evaluation.answer
    parts = {one.name: asked_of(one, answer) for one in federations}
    whole = [
        Asked(
            one.name,
            one.title,
            tuple(line for part in parts[one.name] for line in part.lines),
            one.measure.metrics_of(answer),
        )
        for one in federations
    ]
    joint: dict[str, Answers] = {one.name: {} for one in federations}
    for name, some in parts.items():
        for found in answered(sitting, some):
            joint[name] = joined(found)
            yield written(sitting, whole, joint, Shown((), _READING))


def joined(found: Mapping[str, Answers]) -> Answers:
    """The answers of all clients that were left out, line by line; a line counts once all of them have it.

    Args:
        found: client that was left out -> line -> its answers.
    """
    names = dict.fromkeys(name for answers in found.values() for name in answers)
    return {
        name: [one for answers in found.values() for one in answers[name]]
        for name in names
        if all(name in answers for answers in found.values())
    }


_TASK = ("data.task=needles", "evaluation.arms=[]")
_TINY = Scale(about="seconds", sets=(*_TASK, *settings.TINY_NEEDLES))
_SMALL = Scale(
    about="SmolLM2-135M: needles of 144 tokens from the public rules, window 36, and news of 256 tokens from fresh "
    "ones, window 64; two clients of each left out, 30 questions or 12 stretches",
    sets=(
        *_TASK,
        *settings.SMOLLM2,
        "data.tokens=144",
        "data.questions=4",
        "data.train=120",
        "data.validation=0",
        "data.test=30",
        "memory.window-tokens=36",
        "training.rounds=3",
        "training.local-steps=4",
        "training.local-lr=1e-2",
        "federation.quorum=5",
        "evaluation.batch=10",
    ),
)
_PAPER = Scale(
    about="Llama-3.2-1B (or any: --set backbone.id=...), each of the seven clients, and each of five domains of "
    "news, left out in turn, two rounds of one epoch; a GPU of 48 GB",
    sets=(
        *_TASK,
        *settings.LLAMA_1B,
        "data.tokens=1024",
        "data.questions=4",
        "data.train=750",
        "data.validation=0",
        "data.test=25",
        "training.rounds=2",
        "training.local-steps=188",
        "training.local-lr=3e-3",
        "evaluation.batch=4",
    ),
)
TABLE = Table(
    name="unseen",
    about="A kind of fact, or a domain of text, that no client had in training, with the rules fixed.",
    scales={"tiny": _TINY, "small": _SMALL, "paper": _PAPER},
    lines=lines_at,
    work=work,
)
