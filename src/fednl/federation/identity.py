"""What must be the same when a run is resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednl.federation.record import Federation


def identity(fed: Federation) -> dict[str, Any]:
    """Gives what changes results, by key."""
    training = fed.training.model_dump(mode="json", by_alias=True)
    if fed.training.schedule == "constant":
        del training["rounds"]  # more rounds then only go on from where it stopped
    return {
        "algorithm": type(fed.algorithm).__name__,
        "algorithm-settings": fed.algorithm.settings.model_dump(mode="json", by_alias=True),
        "shared": list(fed.names),
        "lora-ranks": list(fed.settings.lora_ranks),
        "clients": fed.transport.clients(),
        "clients-per-round": fed.asked_per_round,
        "quorum": fed.settings.quorum,
        "quarantine": [fed.settings.quarantine_after, fed.settings.quarantine_rounds],
        "training": training,
        "seed": fed.seed,
        "exchange": fed.exchange.changed(),
    }
