"""Tasks: private text turned into examples, client by client; knows tokenizers, not models or rounds."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednl.data.batches import collate, demonstrations, iterate_batches
    from fednl.data.examples import Event, Example, NeedleExample, Splits, Tokenizer
    from fednl.data.fillers import FillerText, load_filler
    from fednl.data.partition import PartitionRow, partition_rows
    from fednl.data.public import build_public
    from fednl.data.settings import DataSettings
    from fednl.data.stream import Stream
    from fednl.data.tasks import Build, stream_task, task, task_settings

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
    "Stream",
    "Tokenizer",
    "build_public",
    "collate",
    "demonstrations",
    "iterate_batches",
    "load_filler",
    "partition_rows",
    "stream_task",
    "task",
    "task_settings",
]

_HOMES = {
    "DataSettings": "settings",
    "Event": "examples",
    "Example": "examples",
    "FillerText": "fillers",
    "NeedleExample": "examples",
    "PartitionRow": "partition",
    "Splits": "examples",
    "Stream": "stream",
    "Tokenizer": "examples",
    "build_public": "public",
    "collate": "batches",
    "demonstrations": "batches",
    "iterate_batches": "batches",
    "load_filler": "fillers",
    "partition_rows": "partition",
    "stream_task": "tasks",
    "task": "tasks",
    "task_settings": "tasks",
}


def __getattr__(name: str) -> Any:
    if name == "TASKS":
        from fednl.data import tasks

        return {known: tasks.task(known) for known in tasks.TASKS}
    if name in _HOMES:
        return getattr(import_module(f"fednl.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
