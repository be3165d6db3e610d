"""What a run folder's JSON files say, as far as they are there and whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fednl.errors import CheckpointError
from fednl.report.words import escape
from fednl.runs import Run


def recorded(run: Run, name: str) -> tuple[dict[str, Any], list[str]]:
    """A JSON file of the run, or what is wrong with it."""
    if not (run.path / name).exists():
        return {}, [f"{name} is missing"]
    try:
        return run.read_json(name), []
    except CheckpointError as error:
        return {}, [escape(str(error))]


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of recorded settings; empty where there is none."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
