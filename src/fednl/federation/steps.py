"""What a display is told while a round's clients work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fednl.federation.ledger import Ledger
from fednl.federation.record import Federation


class Steps:
    """Turns what clients say while they work into events with the run's steps done and to do.

    Args:
        fed: whose listener is told.
        number: the round, counted from 1.
        asked: the clients at work.
    """

    def __init__(self, fed: Federation, number: int, asked: list[str]) -> None:
        self._fed, self._number = fed, number
        self._steps = dict.fromkeys(asked, 0)
        per_round = fed.asked_per_round * fed.training.local_steps
        self._before, self._total = (number - 1) * per_round, fed.training.rounds * per_round
        self._answered = 0

    def step(self, client: str, facts: dict[str, Any]) -> None:
        """Tells of a local step of a client."""
        self._steps[client] = int(facts.get("step", 0))
        self._tell("step", client, facts, done=self._done(), total=self._total)

    def client_done(self, client: str, ledger: Ledger) -> None:
        """Tells that a client is done, with what its row says."""
        self._steps[client] = self._fed.training.local_steps
        self._answered += 1
        row = next(row for row in ledger.rows() if row["name"] == client)
        facts: dict[str, Any] = {
            key: row[key] for key in ("status", "reason", "num_examples", "loss", "seconds_s") if key in row
        }
        self._tell("client-done", client, facts, done=self._answered, total=len(self._steps))

    def _done(self) -> int:
        return self._before + sum(self._steps.values())

    def _tell(self, event: str, client: str, facts: Mapping[str, Any], done: int, total: int) -> None:
        rounds = self._fed.training.rounds
        self._fed.tell(event, round=self._number, rounds=rounds, client=client, **facts, done=done, total=total)
