"""A client that nobody trained on: shared rules, fixed, against what it could have learned alone. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from fednl.data.needle_clients import CLIENTS
from fednl.evaluation.measures import NEEDLES
from fednl.evaluation.outcomes import Outcome
from fednl.reproduce import settings
from fednl.reproduce.comparison import Asked, Shown, answered, written
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Line, Method, Page, Scale, Table

OURS = "FedNL rules of the other clients"
_CLIENTS: Mapping[str, tuple[str, ...]] = {
    "tiny": ("passkey", "uuid-code"),
    "small": ("passkey", "multi-value"),
    "paper": ("passkey", "uuid-code", "name-date", "phrase-code", "counter-state", "multi-key", "multi-value"),
}
"""Who is left out, one at a time, by scale: the first and the last of the seven, or each."""
_READING = (
    "Each client in turn is left out of the whole training, then answers its questions with the rules fixed. Its own "
    "rules are those that it trains alone, with as many steps as a client takes in the federation. Where the gate is "
    "closed only the window reads. Before training the rules are the public ones (scale small) or fresh. The paper "
    "claims that memory adapts for clients it has not seen, and prints no table of it: no column stands beside ours."
)


def lines_of(client: str, everyone: Sequence[str]) -> tuple[Line, ...]:
    """The lines of one client that is left out.

    Args:
        client: who.
        everyone: all clients of the table, this one among them.
    """
    memory = Method(f"fednl-without-{client}", (_held_out([client]),))
    lora = Method(f"lora-without-{client}", (*settings.LORA, _held_out([client])))
    others = _held_out([other for other in everyone if other != client])
    alone = Method(f"own-rules-of-{client}", (others, "federation.algorithm=local-only", "federation.quorum=1"))
    return (
        Line(OURS, memory),
        Line("gate closed (window only)", memory, "window-only"),
        Line("rules before training", memory, "public-rules"),
        Line("FedAvg-LoRA of the other clients, same window", lora),
        Line("its own rules, trained alone", alone),
    )


def _held_out(clients: Sequence[str]) -> str:
    return f"data.hold-out-clients={json.dumps(list(clients))}"


def asked_of(sitting: Sitting) -> list[Asked]:
    """The questions of every client that is left out, in turn."""
    everyone = list(CLIENTS)[: sitting.config(Method("")).data.clients]
    return [
        Asked(client, client, lines_of(client, everyone), (f'evaluation.clients=["{client}"]',))
        for client in _CLIENTS[sitting.scale]
    ]


def work(sitting: Sitting) -> Iterator[Page]:
    """Trains without each client in turn, asks it, and gives the table after each step."""
    parts = asked_of(sitting)
    whole = Asked("unseen", "clients left out", tuple(line for part in parts for line in part.lines))
    for found in answered(sitting, parts):
        yield written(sitting, [whole], {whole.name: joined(found)}, Shown((), NEEDLES.metrics, _READING))


def joined(found: Mapping[str, Mapping[str, list[Outcome]]]) -> dict[str, list[Outcome]]:
    """The answers of all clients that were left out, line by line; a line counts once all of them have it."""
    names = dict.fromkeys(name for answers in found.values() for name in answers)
    return {
        name: [one for answers in found.values() for one in answers[name]]
        for name in names
        if all(name in answers for answers in found.values())
    }


_TASK = ("data.task=needles", "evaluation.arms=[]")
_TINY = Scale(about="seconds", sets=(*_TASK, *settings.TINY_NEEDLES))
_SMALL = Scale(
    about="SmolLM2-135M from the public rules, 144 tokens, window 36; two clients left out, 30 questions each",
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
    own={f"lora-without-{client}": ("training.local-lr=3e-3",) for client in _CLIENTS["small"]},
)
_PAPER = Scale(
    about="Llama-3.2-1B (or any: --set backbone.id=...), each of the seven clients left out in turn, two rounds of one "
    "epoch; a GPU of 48 GB",
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
    own={f"lora-without-{client}": settings.paper_lora(16, "3e-4") for client in _CLIENTS["paper"]},
)
TABLE = Table(
    name="unseen",
    about="A kind of fact that no client had in training is asked for, with the rules fixed.",
    scales={"tiny": _TINY, "small": _SMALL, "paper": _PAPER},
    work=work,
)
