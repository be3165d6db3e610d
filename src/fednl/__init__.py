"""Teach one frozen language model how to remember, together, without sharing text.

Start with `fednl.attach_memory(model, fednl.MemoryConfig())` on a Hugging Face causal language model, or with
`fednl train FILE` on the command line. Names load on first use: importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednl.config import Config as Config
    from fednl.config import load_config as load_config
    from fednl.errors import FednlError as FednlError
    from fednl.loading import load as load
    from fednl.memory import MemoryCache as MemoryCache
    from fednl.memory import MemoryConfig as MemoryConfig
    from fednl.memory import attach_memory as attach_memory
    from fednl.memory import closed as closed
    from fednl.memory import delta_rule as delta_rule
    from fednl.memory import delta_rule_reference as delta_rule_reference
    from fednl.memory import detach_memory as detach_memory
    from fednl.memory import load_rules as load_rules
    from fednl.memory import rules as rules
    from fednl.memory import save_rules as save_rules
    from fednl.runs import Run as Run
    from fednl.training import train as train

__version__ = "0.1.0"

_FILE_OF = {
    "Config": "config",
    "FednlError": "errors",
    "MemoryCache": "memory",
    "MemoryConfig": "memory",
    "Run": "runs",
    "attach_memory": "memory",
    "closed": "memory",
    "delta_rule": "memory",
    "delta_rule_reference": "memory",
    "detach_memory": "memory",
    "load": "loading",
    "load_config": "config",
    "load_rules": "memory",
    "rules": "memory",
    "save_rules": "memory",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_FILE_OF, "__version__"])
