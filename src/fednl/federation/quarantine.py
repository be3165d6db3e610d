"""Who is left out for a while, because what it sends is refused round after round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fednl.federation.ledger import VALID
from fednl.federation.settings import FederationSettings


@dataclass(frozen=True)
class Conduct:
    """What the server remembers of clients' refused replies; a part of every checkpoint.

    Args:
        refusals: by client, how many of its replies in a row were refused; clients without any are left out.
        until: by client, the last round in which it is not asked.
    """

    refusals: dict[str, int] = field(default_factory=dict)
    until: dict[str, int] = field(default_factory=dict)

    def out(self, round: int) -> dict[str, int]:
        """Gives the clients that are not asked in a round, with the last such round of each."""
        return {client: last for client, last in sorted(self.until.items()) if round <= last}

    def free(self, clients: Iterable[str], round: int) -> list[str]:
        """Lists the clients that may be asked in a round, in the order given."""
        out = self.out(round)
        return [client for client in clients if client not in out]

    def after(self, rows: Iterable[Mapping[str, Any]], round: int, settings: FederationSettings) -> Conduct:
        """Gives what is remembered after a round.

        A valid reply clears a client's record. One that failed or was late does nothing to it: a slow network is
        no misconduct. Whoever comes back from quarantine is out again at the next refusal.

        Args:
            rows: the round's clients, as `Ledger.rows` gives them.
            round: the round, counted from 1.
            settings: `quarantine_after` and `quarantine_rounds` are read.
        """
        refusals, until = dict(self.refusals), dict(self.until)
        for row in rows:
            client = row["name"]
            if row["status"] in VALID:
                refusals.pop(client, None)
                until.pop(client, None)
            elif row["status"] == "refused":
                refusals[client] = refusals.get(client, 0) + 1
                if 0 < settings.quarantine_after <= refusals[client]:
                    until[client] = round + settings.quarantine_rounds
        return Conduct(refusals, until)
