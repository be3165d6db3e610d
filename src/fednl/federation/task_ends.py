"""When a task of a stream ends for a client: once, late where it must, and opened again where it ended too soon.

A client's state says it: `open/TASK` for the task that has yet to end, else `closed/TASK`; and after an end with rounds
of the task left, in `undo/was/NAME` and `undo/new/NAME` what the end changed and what it brought.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fednl.federation.message import Message
from fednl.federation.params import ClientState, kept

if TYPE_CHECKING:
    from fednl.federation.algorithms.fedavg import FedAvg
    from fednl.federation.local import LocalPlan, Problem

_OPEN, _CLOSED, _UNDO = "open", "closed", "undo"


class TaskEnds:
    """What a client's state says of tasks as a round begins; an earlier task that has not ended yet ends here.

    A client foresees its last round of a task from the seed. It is asked against that where others are in quarantine or
    a round is drawn otherwise: the task is then opened again, and ends anew with all that it has learned since.

    Args:
        algorithm: whose hooks are called.
        problem: the client's data and loss.
        received: the server's message.
        state: the client's state. Not modified.
        plan: the round's.
    """

    def __init__(
        self, algorithm: FedAvg, problem: Problem, received: Message, state: ClientState, plan: LocalPlan
    ) -> None:
        self._algorithm, self._plan = algorithm, plan
        self.ends = plan.ends
        """The task that ends with the round; empty for none, also where it has ended for good."""
        opened, closed = (next(iter(kept(state, mark)), plan.task) for mark in (_OPEN, _CLOSED))
        was, new = (kept(state, f"{_UNDO}/{part}") for part in ("was", "new"))
        marks = tuple(f"{mark}/" for mark in (_OPEN, _CLOSED, _UNDO))
        self.begun = {name: tensor for name, tensor in state.items() if not name.startswith(marks)}
        """The state that the round begins with, without what is noted here."""
        self._has_ended = bool(plan.task) and f"{_CLOSED}/{plan.task}" in state and not was and not new
        if self._has_ended:
            self.ends = ""
        elif closed == plan.task:
            self.begun = {name: tensor for name, tensor in self.begun.items() if name not in new} | was
        if opened != plan.task:
            before = problem.earlier(opened)
            params, begun = algorithm.start(received, self.begun, before)
            self.begun = algorithm.boundary(opened, params, begun, before)

    @property
    def may_reopen(self) -> bool:
        """Whether what the end of the task changes is to be kept, as rounds of the task are left."""
        return bool(self.ends) and self._algorithm.consolidates and not self._plan.final

    def noted(self, state: ClientState, still_open: ClientState | None) -> ClientState:
        """Gives a client's state after the round with what is noted of its task.

        Args:
            state: as the algorithm left it.
            still_open: as it would have left it had the task not ended; None where it cannot be opened again.
        """
        if not self._algorithm.consolidates:
            return state
        task = self.ends or self._plan.task
        if not task:
            return state
        mark = _CLOSED if self.ends or self._has_ended else _OPEN
        found = {**state, f"{mark}/{task}": torch.ones(())}
        for name, tensor in (still_open or {}).items():
            if name not in state or not torch.equal(tensor, state[name]):
                found[f"{_UNDO}/was/{name}"] = tensor
        brought = [name for name in state if name not in still_open] if still_open is not None else []
        return found | {f"{_UNDO}/new/{name}": torch.zeros(0) for name in brought}
