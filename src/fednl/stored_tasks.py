"""What a run takes from the store of context vectors, and leaves there: a known task's end, or a like task's start.

The store is in the user's cache folder and never leaves the machine. A run's description of itself (`facts`) has a
`context_key` where its settings let it look (`context-vectors.store`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fednl.errors import CheckpointError
from fednl.federation.algorithms import FedAvg, IfedIcl
from fednl.federation.params import Params
from fednl.fetching import cache_folder
from fednl.models.context_injection import COEFFICIENTS
from fednl.models.context_store import ContextStore, TaskKey

OnEvent = Callable[[Mapping[str, Any]], None]


def store() -> ContextStore:
    """Gives the store of this user."""
    return ContextStore(cache_folder() / "context")


def keep(facts: Mapping[str, Any], params: Params) -> None:
    """Puts a finished run's vectors and coefficients into the store, where its settings say so."""
    if "context_key" in facts:
        store().put(TaskKey(**facts["context_key"]), params)


def known(facts: Mapping[str, Any], start: Params, on_event: OnEvent) -> Params:
    """Gives the vectors and coefficients that the store has for this run's task; nothing where it may not look.

    Args:
        facts: what the run says of itself.
        start: the start values of all rules.
        on_event: is told that the task is known.

    Raises:
        CheckpointError: the entry is damaged, or of other shapes than this run's.
    """
    found = store().get(TaskKey(**facts["context_key"])) if "context_key" in facts else None
    for name, tensor in (found or {}).items():
        if tensor.shape != start[name].shape:
            raise CheckpointError(
                f"{store().folder} holds {name} {list(tensor.shape)} for this task, and its model has "
                f"{list(start[name].shape)}: delete that folder, and the task is learned again."
            )
    if found:
        _note(on_event, "the task is known: starting from stored context vectors and coefficients")
    return found or {}


def ask_for_like(algorithm: FedAvg, facts: Mapping[str, Any], on_event: OnEvent) -> None:
    """Lets IFed-ICL go on from the coefficients of like tasks (`ContextStore.near`); other algorithms stay as they are.

    What was found is told once, after the first round of coefficients. A run that stops in that round and is taken up
    looks again, so that it has the same bits only if the store has.

    Args:
        algorithm: the run's own; changed in place.
        facts: what the run says of itself.
        on_event: is told what was found.
    """
    if not isinstance(algorithm, IfedIcl):
        return

    def like(coefficients: Tensor) -> Tensor | None:
        found = store().near(TaskKey(**facts["context_key"]), coefficients)
        _note(on_event, found.sentence())
        return None if found.params is None else found.params[COEFFICIENTS]

    algorithm.like = like


def _note(on_event: OnEvent, text: str) -> None:
    on_event({"event": "note", "text": text})
