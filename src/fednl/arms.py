"""What a comparison compares: which arms are trained, on what, and how each arm is looked at. Imports no torch.

Two tables. `TRAINED`: rules that a run makes. `VIEWS`: ways of answering the test questions, each with the rules
it needs and what is done to the memory or the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fednl.config import Config
from fednl.federation.algorithms import ALGORITHMS, FedAvg
from fednl.federation.exchange import PLAIN, Exchange
from fednl.federation.settings import TrainingSettings

POOLED = "pooled"

Setup = Literal["bare", "window", "memory", "lora"]
"""What sits on the backbone: nothing, the attention window, the window and memory, or the window and LoRA."""


@dataclass(frozen=True)
class Trained:
    """Rules that a run makes, by one method.

    Attributes:
        setup: what is trained.
        algorithm: a name in `ALGORITHMS`; empty for the run's own.
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
        removed: ask with every event replaced by filler.
        zeroed: forget the memory state just before the question.
    """

    setup: Setup
    rules: str = ""
    removed: bool = False
    zeroed: bool = False


TRAINED: dict[str, Trained] = {
    "federated": Trained("memory"),
    "federated-lora": Trained("lora", "fedavg", "lora", folder="arms/federated-lora"),
    "local-only": Trained("memory", "local-only", folder="arms/local-only"),
    POOLED: Trained("memory", "fedavg", "all", pooled=True, folder="arms/pooled"),
}

VIEWS: dict[str, View] = {
    "full-attention": View("bare"),
    "window-only": View("window"),
    "public-rules": View("memory", "start"),
    "federated-lora": View("lora", "federated-lora"),
    "federated": View("memory", "federated"),
    "state-zeroed": View("memory", "federated", zeroed=True),
    "events-removed": View("memory", "federated", removed=True),
    "local-only": View("memory", "local-only"),
    POOLED: View("memory", POOLED),
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
    kind = TRAINED[arm]
    if not kind.algorithm:
        return ALGORITHMS[config.federation.algorithm](config.method_settings, config.federation.shared)
    return ALGORITHMS[kind.algorithm](None, kind.shared)


def exchange_of(config: Config, arm: str) -> Exchange:
    """Gives how an arm's updates travel and become one: as the run's, where several clients share something."""
    kind = TRAINED[arm]
    shares = ALGORITHMS[kind.algorithm or config.federation.algorithm].traits.shares
    return config.exchange if shares and not kind.pooled else PLAIN


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
