"""Tasks: private text turned into examples, client by client; knows tokenizers, not models or rounds."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednl.data.batches import collate, iterate_batches
    from fednl.data.examples import Event, NeedleExample, Splits, Tokenizer
    from fednl.data.fillers import FillerText, load_filler
    from fednl.data.needles import Build
    from fednl.data.partition import PartitionRow, partition_rows
    from fednl.data.public import build_public
    from fednl.data.settings import DataSettings

    TASKS: dict[str, Build]

__all__ = [
    "TASKS",
    "DataSettings",
    "Event",
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
]

# A new task is one file and one line here.
_TASK_BUILDERS = {"needles": "fednl.data.needles:build", "public": "fednl.data.public:build"}

_HOMES = {
    "DataSettings": "settings",
    "Event": "examples",
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
    """Finds the function that builds a task's examples.

    Args:
        name: the value of `data.task`.

    Raises:
        SettingsError: the task does not exist.
    """
    builder = _TASK_BUILDERS.get(name)
    if builder is None:
        from fednl.errors import SettingsError

        raise SettingsError(f'data.task is "{name}"; it must be one of: {", ".join(sorted(_TASK_BUILDERS))}.')
    module, attribute = builder.split(":")
    found: Build = getattr(import_module(module), attribute)
    return found


def __getattr__(name: str) -> Any:
    if name == "TASKS":
        return {known: task(known) for known in _TASK_BUILDERS}
    if name in _HOMES:
        return getattr(import_module(f"fednl.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
