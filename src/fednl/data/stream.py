"""Streams of tasks: which task a client is at in which round, and when one ends for it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pydantic import Field, field_validator

from fednl.section import Section


class TasksSettings(Section):
    """The `[tasks]` section: the tasks that every client meets one after the other.

    Attributes:
        order: names of kinds of data, each at most once (for needles, of the seven kinds); empty for no stream: one
            task, which does not end. A round trains on the task of that round alone.
        rounds_per_task: rounds that a task lasts; `training.rounds` must be this times the number of tasks.
        rotate: whether the second client begins with the second task and comes to the first one last, and so on, so
            that in one round clients are at different tasks; otherwise all go in this order.

    Source: ours; federated streams as in FedWeIT (arXiv 2003.03196), where every client has an order of its own.
    """

    # Not strict: TOML and JSON know lists, and a frozen section holds a tuple.
    order: tuple[str, ...] = Field(default=(), strict=False)
    rounds_per_task: int = Field(default=1, ge=1)
    rotate: bool = False

    @field_validator("order")
    @classmethod
    def _each_task_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("name each task once")
        return value

    @property
    def last_rounds(self) -> list[int]:
        """The last round of each place in the order; empty without a stream."""
        return [self.rounds_per_task * (place + 1) for place in range(len(self.order))]


@dataclass(frozen=True)
class Stream:
    """The streams of all clients.

    Attributes:
        settings: the `[tasks]` section, with an order.
        clients: all clients, in the order that rotation goes by.
    """

    settings: TasksSettings
    clients: tuple[str, ...]

    def tasks_of(self, client: str) -> tuple[str, ...]:
        """A client's tasks, in its order."""
        order = self.settings.order
        first = self.clients.index(client) % len(order) if self.settings.rotate else 0
        return order[first:] + order[:first]

    def at(self, client: str, round: int) -> str:
        """The task that a client is at in a round, counted from 1; after the last round the last task."""
        place = (round - 1) // self.settings.rounds_per_task
        return self.tasks_of(client)[min(place, len(self.settings.order) - 1)]

    def last_round(self, client: str, task: str) -> int:
        """The last round of one of a client's tasks, counted from 1."""
        return self.settings.last_rounds[self.tasks_of(client).index(task)]

    def ends(self, client: str, round: int, asked: Callable[[int], Collection[str]]) -> str:
        """Names the task that ends for a client with a round; empty where none does.

        With a part of the clients asked in each round, a client is rarely asked in the very last round of a task: the
        task ends for it with the last round in which it is asked. That is foreseen, and may turn out otherwise.

        Args:
            client: one that is asked in this round.
            round: counted from 1.
            asked: gives the clients that are asked in a later round.
        """
        per_task = self.settings.rounds_per_task
        last = ((round - 1) // per_task + 1) * per_task
        again = any(client in asked(later) for later in range(round + 1, last + 1))
        return "" if again else self.at(client, round)
