"""Refuses adapters and federation that make no sense together, before a model or data is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fednl.data.tasks import DEMONSTRATED
from fednl.errors import SettingsError
from fednl.federation.groups import may_let_out

if TYPE_CHECKING:
    from fednl.federation.algorithms.fedavg import FedAvg
    from fednl.federation.settings import FederationSettings, TrainingSettings
    from fednl.federation.traits import Traits


def check_adapters(federation: FederationSettings, rank: int, traits: Traits) -> None:
    """Checks that what is to be trained is there, and is what the algorithm trains.

    Args:
        federation: the `[federation]` section.
        rank: `lora.rank`, 0 for no LoRA.
        traits: the algorithm's.

    Raises:
        SettingsError: a LoRA without a rank, or context vectors without the algorithm that makes them, or the reverse.
    """
    adapters = federation.adapters
    if "lora" in adapters and rank == 0:
        raise SettingsError(
            f"[federation] adapters = {json.dumps(adapters)}, but [lora] rank = 0 attaches none; set the rank to 1 or "
            "more."
        )
    if traits.needs_context != ("context-vectors" in adapters):
        raise SettingsError(
            f'[federation] algorithm = "{federation.algorithm}" does not go with adapters = {json.dumps(adapters)}: '
            'context vectors are made by algorithm = "ifed-icl" or "i2cl", and these need adapters = "context-vectors".'
        )


def check_asked(federation: FederationSettings, clients: int) -> None:
    """Checks that no more clients are wanted in a round than train.

    Args:
        federation: the `[federation]` section.
        clients: how many train, those held out not among them.

    Raises:
        SettingsError: no client is left to train, or `clients-per-round` or `quorum` is above that.
    """
    if clients < 1:
        raise SettingsError("[data] hold-out-clients names every client, so that none trains: leave one out.")
    for key, number in (("clients-per-round", federation.clients_per_round), ("quorum", federation.quorum)):
        if number > clients:
            raise SettingsError(
                f"[federation] {key} = {number}, but {clients} clients train ([data] clients, without those in "
                f"hold-out-clients): lower {key}."
            )


def check_demonstrated(federation: FederationSettings, task: str, traits: Traits) -> None:
    """Checks that context vectors can be read off the task's examples; to answer with them, any task does.

    Args:
        federation: the `[federation]` section.
        task: `data.task`.
        traits: the algorithm's.

    Raises:
        SettingsError: the examples cannot be shown with their answers.
    """
    if traits.needs_context and task not in DEMONSTRATED:
        raise SettingsError(
            f'[data] task = "{task}" has no examples that could be shown with their answers, which [federation] '
            f'algorithm = "{federation.algorithm}" reads context vectors off: set task = "{DEMONSTRATED[0]}", or '
            'algorithm = "fedavg" and adapters = "memory".'
        )


def check_lora(
    algorithm: FedAvg,
    federation: FederationSettings,
    training: TrainingSettings,
    rank: int,
    arm_rank: int,
) -> None:
    """Checks an algorithm against the LoRA there is.

    Args:
        algorithm: with its own settings.
        federation: the `[federation]` section.
        training: the `[training]` section.
        rank: `lora.rank`, 0 for no LoRA.
        arm_rank: the rank of the LoRA arm of a comparison, 0 if there is no such arm.

    Raises:
        SettingsError: the algorithm needs a LoRA, or a larger one, or one that is shared, or may keep no optimiser
            state; or a client is to have a rank that is not there.
    """
    name, traits = federation.algorithm, algorithm.traits
    if traits.needs_lora and rank == 0:
        raise SettingsError(
            f'[federation] algorithm = "{name}" trains LoRA factors, but [lora] rank = 0 attaches none; '
            'set the rank to 1 or more, or algorithm = "fedavg".'
        )
    own = algorithm.client_rank(rank)
    if traits.needs_lora and own < 1:
        raise SettingsError(
            f'[lora] rank = {rank} leaves no component for the clients of algorithm = "{name}" to train; '
            f"set it to {rank - own + 1} or more, or the algorithm's own rank lower."
        )
    factors = ("A", "B") if traits.averages_products else ("B",) if traits.needs_lora else ()
    out = {factor: may_let_out(federation.shared, "lora", f".lora_{factor}") for factor in ("A", "B")}
    if stay := [factor for factor in factors if not out[factor]]:
        which = f" {stay[0]}" if any(out.values()) else ""
        raise SettingsError(
            f"[federation] shared = {json.dumps(federation.shared)} lets no LoRA factor{which} out, which algorithm = "
            f'"{name}" averages; add "lora" to it, or set algorithm = "fedavg".'
        )
    if traits.renews_factors and training.optimizer_state != "reset":
        raise SettingsError(
            f'[training] optimizer-state = "{training.optimizer_state}", but algorithm = "{name}" gives '
            'clients other LoRA factors every round, for which kept moments mean nothing; set it to "reset".'
        )
    most = own if rank else arm_rank
    for entry in federation.lora_ranks:
        if int(entry.rpartition("=")[2]) > most:
            raise SettingsError(
                f'[federation] lora-ranks = "{entry}", but a client here trains {most} LoRA components at '
                "most; lower it, or raise [lora] rank."
            )
