"""Where a run stands between two rounds, and how that gets to disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from fednl.federation.accounting import Spent
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.checkpoint import prune, save_round, write_tensors
from fednl.federation.exchange import PLAIN, Exchange
from fednl.federation.identity import identity
from fednl.federation.ledger import Ledger
from fednl.federation.params import ClientState, Params, copy
from fednl.federation.quarantine import Conduct
from fednl.federation.secure import forget
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.transport import Transport
from fednl.files import writing
from fednl.runs import Run

OnEvent: TypeAlias = Callable[[Mapping[str, Any]], None]


_NO_ANSWERS: Mapping[str, Sequence[bool]] = {}


@dataclass(frozen=True)
class Validation:
    """What was measured after a round.

    Args:
        metrics: of the whole; the lowest `"loss"` makes `best/`.
        clients: by client, its own measures; they go into the clients' rows, and for those that were not asked in the
            round into `not_asked`.
        worst: whose loss is the highest; empty where that is not known.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[str, float]] = field(default_factory=dict)
    worst: str = ""

    @classmethod
    def of_clients(cls, losses: Mapping[str, float], answers: Mapping[str, Sequence[bool]] = _NO_ANSWERS) -> Validation:
        """Gives the view of a cohort: mean over clients, each counted once, the worst of them, and their spread.

        Args:
            losses: by client; the mean is summed in this order.
            answers: by client, which of its questions were answered right, where they were answered; the accuracy is
                that of all questions together.
        """
        mean = sum(losses.values()) / len(losses)
        # A NaN compares with nothing, so it would hide from max; no summary is better than one without it.
        worst, best = (max(losses.values()), min(losses.values())) if math.isfinite(mean) else (math.nan, math.nan)
        metrics = {"loss": mean, "loss_worst": worst, "loss_spread": worst - best}
        clients = {client: {"loss": loss} for client, loss in losses.items() if math.isfinite(loss)}
        asked = {client: right for client, right in answers.items() if right}
        if asked:
            metrics["accuracy"] = sum(map(sum, asked.values())) / sum(map(len, asked.values()))
            for client, right in asked.items():
                clients[client] = {**clients.get(client, {}), "accuracy": sum(right) / len(right)}
        return cls(
            metrics, clients, max(losses, key=lambda client: (not math.isfinite(losses[client]), losses[client]))
        )


Validate: TypeAlias = Callable[[int, Params], Validation]


@dataclass(frozen=True)
class Point:
    """Where a run stands between two rounds; exactly what a checkpoint holds."""

    round: int
    params: Params
    server_state: ClientState = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    failed_rounds: int = 0
    conduct: Conduct = field(default_factory=Conduct)
    spent: Spent | None = None
    told: tuple[str, ...] = ()
    """The clients that have what the algorithm gives them once."""
    updates: int = 0
    """How many rounds changed the rules."""
    begun: tuple[int, ...] = ()
    """The first round of each attempt after attempt 0: where the run went back behind rounds that failed."""
    counted: dict[str, int] = field(default_factory=dict)
    """By client, the last round whose update holds a reply of it; who is in none is left out."""
    sound: int = 0
    """The last round before those that failed; this one if none did since the rules changed."""
    best_then: int = 0
    """The round that `best` was of after that one."""

    @property
    def attempt(self) -> int:
        """How often the run went back behind rounds that failed; what is drawn in a round depends on it."""
        return len(self.begun)

    @property
    def settled(self) -> int:
        """The newest round that a run which ends now is not taken back behind; 0 for the very start."""
        return self.sound if self.updates else 0


@dataclass(frozen=True)
class Federation:
    """What stays the same over all rounds."""

    algorithm: FedAvg
    transport: Transport
    settings: FederationSettings
    training: TrainingSettings
    run: Run
    folder: str
    seed: int
    on_event: OnEvent
    validate_round: Validate | None
    names: tuple[str, ...]
    asked_per_round: int
    milestones: Collection[int] = ()
    first_round: int = 1
    """The first round of this sitting."""
    exchange: Exchange = PLAIN
    adapters: str = ""
    """What clients must have attached, as `run_rounds` takes it."""
    final_round: int = 0
    """The round that `final/` is of at the start of this sitting: its checkpoint stays until `final/` is of another."""

    @property
    def run_name(self) -> str:
        """What messages of this run and arm carry, so that another's are told apart."""
        return "/".join(part for part in (self.run.path.name, self.folder) if part)

    def inside(self, name: str) -> str:
        """Gives a file's name inside the run's folder."""
        return f"{self.folder}/{name}" if self.folder else name

    def path(self, name: str) -> Path:
        """Gives a folder of this run or arm, made if it is missing."""
        return self.run.folder(self.inside(name))

    def tell(self, event: str, **facts: Any) -> None:
        """Sends an event to whoever listens."""
        self.on_event({"event": event, **facts})


def save(
    fed: Federation, point: Point, ledger: Ledger, reason: str, numbers: Mapping[str, float], seconds_s: float
) -> Point:
    """Measures and writes a finished round: best rules, its row, then the checkpoint that makes it count."""
    loss = ledger.mean_loss()
    metrics: dict[str, float] = {**numbers} if loss is None else {"train_loss": loss, **numbers}
    rows, asked, beside = ledger.rows(), {row["name"] for row in ledger.rows()}, dict[str, Any]()
    if fed.validate_round is not None:
        measured = fed.validate_round(point.round, copy(point.params))
        metrics |= _validation(measured.metrics)
        rows = [row | _validation(measured.clients.get(row["name"], {})) for row in rows]
        others = sorted(measured.clients.keys() - asked)
        beside = {"validation_worst": measured.worst} if measured.worst else {}
        if others:
            beside["not_asked"] = [{"name": name, **_validation(measured.clients[name])} for name in others]
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    score = metrics.get("validation_loss")
    if score is not None and score < point.best.get("loss", math.inf):
        point = replace(point, best={"round": point.round, "loss": score})
        write_tensors(fed.path("best") / "params.safetensors", point.params, header_of(point.round, point.updates))
    if point.sound == point.round:
        point = replace(point, best_then=int(point.best.get("round", 0)))
    facts = {"round": point.round, "metrics": metrics, "updated": not reason, "refused": ledger.refused}
    facts |= ({"reason": reason} if reason else {}) | {"seconds_s": seconds_s}
    out = sorted(client for client in point.conduct.out(point.round) if client not in asked)
    facts |= ({"quarantined": out} if out else {}) | beside
    fed.run.append_jsonl(fed.inside("rounds.jsonl"), {**facts, "clients": rows})
    save_round(
        fed.path("checkpoints"),
        point.round,
        point.params,
        point.server_state,
        {client: forget(state) for client, state in fed.transport.states().items()},
        {
            "best": point.best,
            "failed_rounds": point.failed_rounds,
            "sound": point.sound,
            "best_then": point.best_then,
            "updates": point.updates,
            "attempt": point.attempt,
            "begun": point.begun,
            "conduct": asdict(point.conduct),
            "told": point.told,
            "counted": point.counted,
            **({"spent": point.spent.to_dict()} if point.spent else {}),
            "identity": identity(fed),
        },
        fed.settings.keep_checkpoints,
        _spared(fed, point) | {fed.final_round},
    )
    fed.tell("round-end", rounds=fed.training.rounds, **({} if loss is None else {"loss": loss}), **facts)
    return point


def write_final(fed: Federation, point: Point) -> None:
    """Leaves the newest finished rules in `final/`, and no checkpoint that was there for those before them."""
    write_tensors(fed.path("final") / "params.safetensors", point.params, header_of(point.round, point.updates))
    with writing(checkpoints := fed.path("checkpoints")):
        prune(checkpoints, fed.settings.keep_checkpoints, _spared(fed, point))


def header_of(round: int, updates: int) -> dict[str, Any]:
    """Gives what is said beside rules: their round, and that they are those of the start, if none has changed them.

    Args:
        round: counted from 1; 0 for the start.
        updates: how many rounds changed the rules.
    """
    return {"round": round} | ({} if updates else {"updates": 0})


def _spared(fed: Federation, point: Point) -> set[int]:
    """The rounds whose checkpoints stay, however old."""
    return {*fed.milestones, int(point.best.get("round", 0)), point.best_then, point.sound}


def _validation(measured: Mapping[str, float]) -> dict[str, float]:
    return {f"validation_{name}": float(value) for name, value in measured.items()}
