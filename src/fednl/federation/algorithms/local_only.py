"""Local-only: every client trains alone; the yardstick that federation has to beat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from fednl.federation.algorithms.fedavg import FedAvg, Traits


class LocalOnly(FedAvg):
    """Shares nothing: same rounds, steps, batches and optimiser as FedAvg, and no number leaves a client.

    A client's own rules are in its state: `fednl.federation.params.personal(params, state)`.

    Source: ours.
    """

    traits: ClassVar[Traits] = Traits(shares=False)

    def shared(self, names: Iterable[str]) -> list[str]:
        """Lists the names that travel: none."""
        return []
