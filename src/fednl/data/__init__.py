"""Tasks: private text turned into examples, client by client; knows tokenizers, not models or rounds."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from fednl.data.batches import collate, iterate_batches
    from fednl.data.examples import Event, Example, NeedleExample, Splits, Tokenizer
    from fednl.data.fillers import FillerText, load_filler
    from fednl.data.partition import PartitionRow, partition_rows
    from fednl.data.public import build_public
    from fednl.data.settings import DataSettings

    Build = Callable[..., dict[str, Splits[Any]]]
    TASKS: dict[str, Build]

__all__ = [
    "TASKS",
    "DataSettings",
    "Event",
    "Example",
    "FillerText",
    "NeedleExample",
    "PartitionRow",
    "Splits",
    "Tokenizer",
    "build_public",
    "collate",
    "iterate_batches",
    "load_filler",
    "partition_rows",
    "task",
    "task_settings",
]

# A new task is one file and one line here: what builds its examples, and the settings of its own section if any.
_TASKS: dict[str, tuple[str, ...]] = {
    "needles": ("fednl.data.needles:build",),
    "public": ("fednl.data.public:build",),
    "classification": ("fednl.data.classification:build", "fednl.data.classification:ClassificationSettings"),
}

_HOMES = {
    "DataSettings": "settings",
    "Event": "examples",
    "Example": "examples",
    "FillerText": "fillers",
    "NeedleExample": "examples",
    "PartitionRow": "partition",
    "Splits": "examples",
    "Tokenizer": "examples",
    "build_public": "public",
    "collate": "batches",
    "iterate_batches": "batches",
    "load_filler": "fillers",
    "partition_rows": "partition",
}


def task(name: str) -> Build:
    """Finds the function that builds a task's examples: (data, tokenizer, window tokens, answer, seed) -> splits.

    A task with settings of its own takes them as a sixth argument.

    Args:
        name: the value of `data.task`.

    Raises:
        SettingsError: the task does not exist.
    """
    found: Build = _load(_entry(name)[0])
    return found


def task_settings(name: str) -> type[BaseModel] | None:
    """Finds the settings class of a task's own section, which has the task's name; None where it has none.

    Args:
        name: the value of `data.task`.

    Raises:
        SettingsError: the task does not exist.
    """
    places = _entry(name)
    kind: type[BaseModel] | None = _load(places[1]) if len(places) > 1 else None
    return kind


def _entry(name: str) -> tuple[str, ...]:
    if name not in _TASKS:
        from fednl.errors import SettingsError

        raise SettingsError(f'data.task is "{name}"; it must be one of: {", ".join(sorted(_TASKS))}.')
    return _TASKS[name]


def _load(place: str) -> Any:
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)


def __getattr__(name: str) -> Any:
    if name == "TASKS":
        return {known: task(known) for known in _TASKS}
    if name in _HOMES:
        return getattr(import_module(f"fednl.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
