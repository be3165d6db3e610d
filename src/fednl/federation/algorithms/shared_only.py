"""Shared-only: FedAvg that trains nothing but what it shares; what a set of rules is worth by itself."""

from __future__ import annotations

from collections.abc import Iterable

from fednl.federation.algorithms.fedavg import FedAvg


class SharedOnly(FedAvg):
    """Leaves every rule that does not travel as it began, so that all that was learned is in what is shared.

    Under FedAvg a client also trains what it keeps to itself, and a small shared set then looks as good as what each
    client learned alone. Here all clients answer with the same rules. With everything shared it is FedAvg.

    Source: ours, for comparisons.
    """

    def trainable(self, names: Iterable[str]) -> list[str]:
        """Lists the names that local steps move, sorted: those that travel.

        Args:
            names: canonical names of all that is trained.
        """
        return self.shared(names)
