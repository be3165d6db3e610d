"""How rules are trained and merged, one file an algorithm. Importing this imports no torch."""

from __future__ import annotations

from fednl.federation.algorithms.fedadam import FedAdam
from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.federation.algorithms.fedavgm import FedAvgM
from fednl.federation.algorithms.local_only import LocalOnly

__all__ = ["ALGORITHMS", "PRESETS", "FedAdam", "FedAvg", "FedAvgM", "LocalOnly", "Traits"]

# A new algorithm is one file and one line here.
ALGORITHMS: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "local-only": LocalOnly,
}
"""The algorithms by the name that `[federation] algorithm` takes."""

# Methods of the paper are combinations: what is trained, how it is merged, what is shared.
PRESETS: dict[str, dict[str, str]] = {
    "fednl": {"adapter": "memory", "algorithm": "fedavg", "shared": "theta"},
    "fedavg-lora": {"adapter": "lora", "algorithm": "fedavg", "shared": "lora"},
}
"""Named combinations of adapter, algorithm and what is shared."""
