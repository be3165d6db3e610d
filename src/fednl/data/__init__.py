"""Tasks: private text turned into examples, client by client; knows tokenizers, not models or rounds."""

from __future__ import annotations

from collections.abc import Callable
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
    from fednl.data.stream import Stream

    TASKS: dict[str, Build]

__all__ = [
    "TASKS",
    "DataSettings",
    "Event",
    "FillerText",
    "NeedleExample",
    "PartitionRow",
    "Splits",
    "Stream",
    "Tokenizer",
    "build_public",
    "collate",
    "iterate_batches",
    "load_filler",
    "partition_rows",
    "stream_task",
    "task",
]

# A new task is one file and one line here.
_TASK_BUILDERS = {"needles": "fednl.data.needles:build", "public": "fednl.data.public:build"}

# Tasks whose data come in kinds that a stream can order.
_STREAM_BUILDERS = {"needles": "fednl.data.needles:build_stream"}

_HOMES = {
    "DataSettings": "settings",
    "Event": "examples",
    "FillerText": "fillers",
    "NeedleExample": "examples",
    "PartitionRow": "partition",
    "Splits": "examples",
    "Stream": "stream",
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
    found: Build = _named(builder)
    return found


def stream_task(name: str) -> Callable[..., dict[str, Splits]]:
    """Finds the function that builds a stream of a task's kinds; it takes the `[tasks]` section besides.

    Args:
        name: the value of `data.task`.

    Raises:
        SettingsError: the task has no kinds that could follow one another.
    """
    builder = _STREAM_BUILDERS.get(name)
    if builder is None:
        from fednl.errors import SettingsError

        raise SettingsError(
            f'data.task = "{name}" has no kinds of data for tasks.order: leave [tasks] out, or set data.task to '
            f"{' or '.join(sorted(_STREAM_BUILDERS))}."
        )
    found: Callable[..., dict[str, Splits]] = _named(builder)
    return found


def _named(place: str) -> Any:
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)


def __getattr__(name: str) -> Any:
    if name == "TASKS":
        return {known: task(known) for known in _TASK_BUILDERS}
    if name in _HOMES:
        return getattr(import_module(f"fednl.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
