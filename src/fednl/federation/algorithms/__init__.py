"""How rules are trained and merged, one file an algorithm. Importing this imports no torch."""

from __future__ import annotations

from typing import Any

from fednl.federation.algorithms.ewc import Ewc
from fednl.federation.algorithms.fedadam import FedAdam
from fednl.federation.algorithms.fedala import FedAla
from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.federation.algorithms.fedavgm import FedAvgM
from fednl.federation.algorithms.fedprox import FedProx
from fednl.federation.algorithms.fedssi import FedSsi
from fednl.federation.algorithms.fedweit import FedWeIt
from fednl.federation.algorithms.fedyogi import FedYogi
from fednl.federation.algorithms.ffa_lora import FfaLora
from fednl.federation.algorithms.flexlora import FlexLora
from fednl.federation.algorithms.flora import Flora
from fednl.federation.algorithms.i2cl import I2cl
from fednl.federation.algorithms.ifed_icl import IfedIcl
from fednl.federation.algorithms.local_only import LocalOnly
from fednl.federation.algorithms.m3 import M3
from fednl.federation.algorithms.per_fedavg import PerFedAvg
from fednl.federation.algorithms.reptile import Reptile
from fednl.federation.algorithms.scaffold import Scaffold
from fednl.federation.algorithms.shared_only import SharedOnly

__all__ = [
    "ALGORITHMS",
    "M3",
    "PRESETS",
    "Ewc",
    "FedAdam",
    "FedAla",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FedSsi",
    "FedWeIt",
    "FedYogi",
    "FfaLora",
    "FlexLora",
    "Flora",
    "I2cl",
    "IfedIcl",
    "LocalOnly",
    "PerFedAvg",
    "Reptile",
    "Scaffold",
    "SharedOnly",
    "Traits",
]

# A new algorithm is one file and one line here.
ALGORITHMS: dict[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "m3": M3,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "ffa-lora": FfaLora,
    "flexlora": FlexLora,
    "flora": Flora,
    "fedala": FedAla,
    "ewc": Ewc,
    "fedssi": FedSsi,
    "fedweit": FedWeIt,
    "reptile": Reptile,
    "per-fedavg": PerFedAvg,
    "ifed-icl": IfedIcl,
    "i2cl": I2cl,
    "shared-only": SharedOnly,
    "local-only": LocalOnly,
}
"""The algorithms by the name that `[federation] algorithm` takes."""

# Methods of the papers are combinations: what is trained, how it is merged, what is shared.
_LORA: dict[str, dict[str, Any]] = {
    "federation": {"adapters": "lora", "algorithm": "fedavg", "shared": "lora"},
    "lora": {"rank": 16},  # of FedNL's needles and of ordinary text; its MMLU has 32
}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "fednl": {"federation": {"adapters": "memory", "algorithm": "fedavg", "shared": "theta"}},
    "ifed-icl": {
        "federation": {"adapters": "context-vectors", "algorithm": "ifed-icl", "shared": "context"},
        "combine": {"weights": "uniform"},  # its equations 3 and 7
    },
    "fedavg-lora": _LORA,
    # The same on a Mamba backbone, which needs no memory of ours: configs/fed-mamba.toml.
    "fed-mamba": {
        "federation": _LORA["federation"],
        "lora": {**_LORA["lora"], "targets": "in_proj,x_proj"},
        "memory": {"layers": "none", "window-tokens": 0},
    },
}
"""Settings by the name that `[federation] preset` takes: section to (key to value)."""
