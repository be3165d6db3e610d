"""The registry of tasks: what builds a task's examples, and the settings of its own section. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fednl.errors import SettingsError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from fednl.data.settings import DataSettings
    from fednl.data.stream import TasksSettings

# Tasks whose data come in kinds that a stream can order: what builds one, and the kinds.
STREAMS = {"needles": ("fednl.data.needles:build_stream", "fednl.data.needle_clients:CLIENTS")}

# What of `[data]` makes examples unlike, and what each task has of it: the key itself, or another of its own.
UNEVEN: dict[str, dict[str, str]] = {
    "needles": {
        "imbalance": "data.imbalance",
        "dirichlet-alpha": "data.dirichlet-alpha",
        "shortest": "data.shortest",
    },
    "classification": {"imbalance": "data.imbalance", "dirichlet-alpha": "classification.alpha"},
}
# Tasks whose examples can be shown with their answers (`fednl.data.examples.Demonstrated`), as context vectors need.
DEMONSTRATED = ("classification",)
# Tasks whose training and test examples are drawn from one source that ends: under other settings another part of it is
# for testing. (Needles are made, and never the same in two splits.)
DRAWN = ("mmlu", "text", "classification")
# Tasks whose builder says in one line what it leaves out, to a callable `note`.
TELLS = ("mmlu",)
_EVEN = {"imbalance": 1.0, "dirichlet-alpha": 0.0, "shortest": 0}

Build = Callable[..., dict[str, Any]]

# A new task is one file and one line here: what builds its examples, and the settings of its own section if any.
TASKS: dict[str, tuple[str, ...]] = {
    "needles": ("fednl.data.needles:build",),
    "public": ("fednl.data.public:build",),
    "mmlu": ("fednl.data.mmlu:build", "fednl.data.mmlu:MmluSettings"),
    "text": ("fednl.data.text:build", "fednl.data.text:TextSettings"),
    "classification": ("fednl.data.classification:build", "fednl.data.classification_settings:ClassificationSettings"),
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


def stream_task(name: str) -> Build:
    """Finds the function that builds a stream of a task's kinds; it takes the `[tasks]` section besides.

    Args:
        name: the value of `data.task`.

    Raises:
        SettingsError: the task has no kinds that could follow one another.
    """
    if name not in STREAMS:
        raise SettingsError(
            f'[tasks] order is set, but data.task = "{name}" has no kinds of data for it: leave [tasks] out, or set '
            f"data.task to {' or '.join(sorted(STREAMS))}."
        )
    found: Build = _load(STREAMS[name][0])
    return found


def check_stream(tasks: TasksSettings, data: DataSettings) -> None:
    """Refuses a stream of what the task has no kinds of, and settings of a stream where there is none.

    Args:
        tasks: the `[tasks]` section.
        data: the `[data]` section.

    Raises:
        SettingsError: the task has no kinds, the order names another, clients hold several at once, or there is no
            order that the other keys could be about.
    """
    if not tasks.order:
        for key, value in tasks.model_dump(by_alias=True, exclude_defaults=True).items():
            raise SettingsError(
                f"[tasks] {key} = {json.dumps(value)}, but there is no stream without an order: set order, or leave "
                f"{key} out."
            )
        return
    stream_task(data.task)
    kinds = _load(STREAMS[data.task][1])
    for kind in tasks.order:
        if kind not in kinds:
            raise SettingsError(
                f'[tasks] order names "{kind}", which is no kind of data of data.task = "{data.task}": choose from '
                f"{', '.join(kinds)}."
            )
    if data.dirichlet_alpha:
        raise SettingsError(
            f"[data] dirichlet-alpha = {data.dirichlet_alpha:g} mixes kinds, and [tasks] order parts them: set "
            "dirichlet-alpha = 0, or leave order out."
        )


def not_read(name: str) -> dict[str, float]:
    """Gives the keys of `[data]` that make examples unlike and that a task does not read, with their defaults.

    Args:
        name: the value of `data.task`.
    """
    return {key: even for key, even in _EVEN.items() if UNEVEN.get(name, {}).get(key) != f"data.{key}"}


def check_uneven(data: DataSettings) -> None:
    """Refuses what would make examples unlike, but not in this task, and that tables would name all the same.

    Args:
        data: the `[data]` section.

    Raises:
        SettingsError: a key is set that the task does not read, or the shortest prompt is longer than the others.
    """
    if data.shortest > data.tokens:
        raise SettingsError(
            f"[data] shortest = {data.shortest} is above tokens = {data.tokens}: lower it, or set it to 0 for prompts "
            "of one length."
        )
    for key, even in not_read(data.task).items():
        value = getattr(data, key.replace("-", "_"))
        if value != even:
            instead = UNEVEN.get(data.task, {}).get(key)
            remedy = f"set {instead} instead" if instead else "leave it out"
            raise SettingsError(
                f'[data] {key} = {value:g}, but data.task = "{data.task}" does not read it: {remedy}, or set task to '
                f"{' or '.join(one for one, keys in UNEVEN.items() if keys.get(key) == f'data.{key}')}."
            )


def check_kinds(data: DataSettings, streams: bool) -> None:
    """Refuses a long tail over one kind of data, which would be its own largest and smallest.

    Args:
        data: the `[data]` section, as clients train on it.
        streams: whether clients hold kinds one after the other.

    Raises:
        SettingsError: `imbalance` is above 1, and there is one client, who holds one kind.
    """
    clients_are_kinds = data.task in STREAMS and not data.dirichlet_alpha and not streams
    if data.imbalance > 1 and data.clients == 1 and clients_are_kinds:
        raise SettingsError(
            f"[data] imbalance = {data.imbalance:g}, but the one client of clients = 1 holds one kind of data: leave "
            "imbalance out, or set clients to 2 or more."
        )


def _entry(name: str) -> tuple[str, ...]:
    if name not in TASKS:
        raise SettingsError(f'data.task is "{name}"; it must be one of: {", ".join(sorted(TASKS))}.')
    return TASKS[name]


def _load(place: str) -> Any:
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)
