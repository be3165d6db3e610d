"""Turns run folders into tables; needs no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednl.report.tables import report as report
    from fednl.report.tables import terminal_table as terminal_table

_FILE_OF = {"report": "tables", "terminal_table": "tables"}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_FILE_OF)
