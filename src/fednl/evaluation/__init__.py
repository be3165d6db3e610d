"""Measures what rules are worth: scoring, the arms of the comparison, and an interval for every number."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednl.evaluation.outcomes import Outcome as Outcome
    from fednl.evaluation.outcomes import load_outcomes as load_outcomes
    from fednl.evaluation.outcomes import save_outcomes as save_outcomes
    from fednl.evaluation.rows import result_rows as result_rows
    from fednl.evaluation.scoring import score_candidates as score_candidates
    from fednl.evaluation.settings import ARMS as ARMS
    from fednl.evaluation.settings import EvaluationSettings as EvaluationSettings

_FILE_OF = {
    "ARMS": "settings",
    "EvaluationSettings": "settings",
    "Outcome": "outcomes",
    "load_outcomes": "outcomes",
    "result_rows": "rows",
    "save_outcomes": "outcomes",
    "score_candidates": "scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_FILE_OF)
