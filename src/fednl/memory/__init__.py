"""The memory: its operator, its layer and its cache; names load on first use, so importing this is cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednl.memory.attach import attach_memory as attach_memory
    from fednl.memory.attach import closed as closed
    from fednl.memory.attach import detach_memory as detach_memory
    from fednl.memory.attach import rules as rules
    from fednl.memory.attach import train_rules as train_rules
    from fednl.memory.cache import MemoryCache as MemoryCache
    from fednl.memory.operator import delta_rule as delta_rule
    from fednl.memory.operator import delta_rule_reference as delta_rule_reference
    from fednl.memory.rules_file import load_rules as load_rules
    from fednl.memory.rules_file import save_rules as save_rules
    from fednl.memory.settings import MemoryConfig as MemoryConfig
    from fednl.memory.state_file import load_state as load_state
    from fednl.memory.state_file import save_state as save_state

_FILE_OF = {
    "MemoryCache": "cache",
    "MemoryConfig": "settings",
    "attach_memory": "attach",
    "closed": "attach",
    "delta_rule": "operator",
    "delta_rule_reference": "operator",
    "detach_memory": "attach",
    "load_rules": "rules_file",
    "load_state": "state_file",
    "rules": "attach",
    "save_rules": "rules_file",
    "save_state": "state_file",
    "train_rules": "attach",
}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_FILE_OF)
