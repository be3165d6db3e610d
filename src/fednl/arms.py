"""What a comparison compares: which arms are trained, on what, and how each arm is looked at. Imports no torch.

Two tables. `TRAINED`: rules that a run makes. `VIEWS`: ways of answering the test questions, each with the rules
it needs and what is done to the memory or the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fednl.config import Config
from fednl.federation.algorithms import ALGORITHMS, FedAvg
from fednl.federation.exchange import PLAIN, Exchange
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.models.settings import DEFAULT_LORA_RANK

POOLED = "pooled"

Setup = Literal["bare", "window", "own", "lora"]
"""What sits on the backbone: nothing, the run's attention window, the run's own adapters, or that window and LoRA."""


@dataclass(frozen=True)
class Trained:
    """Rules that a run makes, by one method.

    Attributes:
        setup: what is trained.
        algorithm: a name in `ALGORITHMS`; empty for the run's own; `"alone"` and `"pooled"` for what the run's own
            names as its counterparts.
        shared: what travels; empty for the run's own.
        pooled: one learner holds everybody's examples and takes everybody's steps.
        folder: where its rounds are kept inside the run.
    """

    setup: Setup
    algorithm: str = ""
    shared: str = ""
    pooled: bool = False
    folder: str = ""


@dataclass(frozen=True)
class View:
    """One way of answering the questions.

    Attributes:
        setup: what sits on the backbone.
        rules: which rules: a name in `TRAINED`, `"start"`, or empty for none.
        prompt: which tokens of an example are the question: `prompt_ids`, `removed_ids` (every event replaced by
            filler) or `shots_ids` (the client's demonstrations before it).
        zeroed: forget the memory state just before the question.
    """

    setup: Setup
    rules: str = ""
    prompt: str = "prompt_ids"
    zeroed: bool = False


TRAINED: dict[str, Trained] = {
    "federated": Trained("own"),
    "federated-lora": Trained("lora", "fedavg", "lora", folder="arms/federated-lora"),
    "local-only": Trained("own", "alone", folder="arms/local-only"),
    POOLED: Trained("own", "pooled", "all", pooled=True, folder="arms/pooled"),
}

VIEWS: dict[str, View] = {
    "full-attention": View("bare"),
    "zero-shot": View("bare"),
    "local-icl": View("bare", prompt="shots_ids"),
    "window-only": View("window"),
    "public-rules": View("own", "start"),
    "federated-lora": View("lora", "federated-lora"),
    "federated": View("own", "federated"),
    "state-zeroed": View("own", "federated", zeroed=True),
    "events-removed": View("own", "federated", prompt="removed_ids"),
    "local-only": View("own", "local-only"),
    POOLED: View("own", POOLED),
}


def trained_arms(config: Config) -> list[str]:
    """Lists the rules that a run with these settings makes; the federated ones always, and first."""
    needed = {VIEWS[arm].rules for arm in config.evaluation.arms}
    return ["federated", *(name for name in TRAINED if name in needed and name != "federated")]


def inside(arm: str, name: str) -> str:
    """Names a file or folder of a trained arm inside the run's folder."""
    folder = TRAINED[arm].folder
    return f"{folder}/{name}" if folder else name


def make_algorithm(config: Config, arm: str) -> FedAvg:
    """The algorithm of a trained arm, with its settings and what it may share."""
    name, shared = algorithm_of(config, arm), TRAINED[arm].shared or config.federation.shared
    own = config.method_settings if name == config.federation.algorithm else None
    return ALGORITHMS[name](own, shared, exchange_of(config, arm).combine.counted)


def algorithm_of(config: Config, arm: str) -> str:
    """Names the algorithm of a trained arm."""
    kind, own = TRAINED[arm].algorithm, config.federation.algorithm
    return {"": own, "alone": ALGORITHMS[own].alone, "pooled": ALGORITHMS[own].pooled}.get(kind, kind)


def ranks_of(config: Config, arm: str) -> tuple[str, ...]:
    """Gives `[federation] lora-ranks` for an arm: none for the pooled learner, who is none of the clients."""
    return federation_of(config, arm).lora_ranks


def adapters_of(config: Config, setup: Setup) -> list[tuple[str, Any]]:
    """Lists the adapters that a setup puts onto the backbone, in order: their kinds, and each one's settings."""
    memory, lora, own = config.memory, config.lora, config.federation.adapters
    window: list[tuple[str, Any]] = [("memory", memory.model_copy(update={"layers": "none"}))]
    if setup != "own":
        found = window if "memory" in own and setup != "bare" else []
        ranked = lora.model_copy(update={"rank": lora.rank or DEFAULT_LORA_RANK})
        return _present([*found, ("lora", ranked)] if setup == "lora" else found)
    sections = {"memory": memory, "lora": lora, "context-vectors": config.context_vectors}
    wanted = [*own, *(["lora"] if "memory" in own and lora.rank else [])]
    return _present((kind, settings) for kind, settings in sections.items() if kind in wanted)


def adapters_hash(config: Config, setup: Setup) -> str:
    """Gives a hash of all that makes a setup's rules comparable but is not in them: kinds, places, scales.

    Clients whose hashes differ must not be averaged: LoRA factors of another alpha fit in name and shape, and mean
    something else.

    Args:
        config: a client's settings.
        setup: what sits on its backbone.

    Returns:
        16 hexadecimal digits of a SHA-256.
    """
    told = []
    for kind, settings in adapters_of(config, setup):
        own = settings.model_dump(mode="json", by_alias=False, exclude=_COMPARABLE[kind])
        if kind == "lora":  # one alpha and one set of modules may be written in several ways
            own |= {"alpha": settings.scale_alpha, "targets": sorted(settings.targets.split(","))}
        told.append([kind, own])
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


# What may differ between clients: how rules begin, how fast they are trained, how a pass is cut into pieces.
_COMPARABLE = {
    "memory": {"start", "chunk_tokens"},
    "lora": {"local_lr"},
    "context-vectors": {"start_lambda", "start_beta", "clip_norm", "store", "noise_std", "keep_mb"},
}


def _present(adapters: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """All but a memory that would attach nothing, as some backbones allow nothing."""
    return [(kind, settings) for kind, settings in adapters if kind != "memory" or not settings.is_absent]


def exchange_of(config: Config, arm: str) -> Exchange:
    """Gives how an arm's updates travel and become one: as the run's, where several clients share something."""
    kind = TRAINED[arm]
    shares = ALGORITHMS[algorithm_of(config, arm)].traits.shares
    return config.exchange if shares and not kind.pooled else PLAIN


def federation_of(config: Config, arm: str) -> FederationSettings:
    """Gives an arm's `[federation]`: the run's own, without what is for clients only for the pooled learner.

    That one takes everybody's steps, so a client's deadline would cut it off.

    Args:
        config: the run's settings.
        arm: a name in `TRAINED`.
    """
    own = config.federation
    if not TRAINED[arm].pooled:
        return own
    alone = {"clients_per_round": 0, "quorum": 1, "lora_ranks": ()}
    return own.model_copy(update={**alone, "pace": "patient", "deadline_s": 0.0, "warm_up_s": 0.0})


def training_of(config: Config, arm: str, clients: int) -> TrainingSettings:
    """Gives an arm's `[training]`: the run's own, with the steps of a whole round for the pooled learner.

    Args:
        config: the run's settings.
        arm: a name in `TRAINED`.
        clients: how many clients take part in training.
    """
    own = config.training
    if TRAINED[arm].pooled:
        asked = config.federation.clients_per_round or clients
        steps = {"local_steps": own.local_steps * asked, "warmup_steps": own.warmup_steps * asked}
        return own.model_copy(update=steps)
    if TRAINED[arm].setup == "lora" and config.lora.local_lr is not None:
        return own.model_copy(update={"local_lr": config.lora.local_lr})
    return own
