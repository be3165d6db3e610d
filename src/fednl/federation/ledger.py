"""The book of one round: who was asked, what came back, what was refused and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fednl.errors import MessageError
from fednl.federation.message import Message
from fednl.federation.transport import Reply
from fednl.federation.validate import Wanted
from fednl.federation.wire import container_bytes

# What a row may hold of a client's own metrics: names that a client invents could carry anything.
_METRICS = ("loss", "loss_first", "loss_last", "seconds_s", "cpu_s")

VALID = ("ok", "empty", "withheld")
"""What a row says of a client whose reply was accepted: with an update, or without, for want of examples."""


@dataclass(frozen=True)
class Verdict:
    """What became of a reply.

    Args:
        client: who sent it.
        is_final: nothing more is expected from this client in this round.
        message: the reply, if it was accepted.
    """

    client: str
    is_final: bool
    message: Message | None = None


class Ledger:
    """Judges a round's replies, and keeps one row a client and the count of refusals by code.

    Args:
        wanted: by client asked, what its reply must be.
        down_bytes: by client asked, the bytes serialised for it.
        down_tensor_bytes: by client asked, how many of these were tensors; the rest is counted as the container's.
    """

    def __init__(
        self, wanted: Mapping[str, Wanted], down_bytes: Mapping[str, int], down_tensor_bytes: Mapping[str, int]
    ) -> None:
        self._wanted = wanted
        # Until something better is known of it, a client has not answered in time.
        self._rows: dict[str, dict[str, Any]] = {
            name: {
                "name": name,
                "down_bytes": size,
                "down_container_bytes": size - down_tensor_bytes[name],
                "status": "late",
            }
            for name, size in down_bytes.items()
        }
        self._answered: set[str] = set()
        self.refused: dict[str, int] = {}

    def judge(self, reply: Reply) -> Verdict:
        """Takes a reply, notes it, and says what is to be done with it.

        Args:
            reply: from the transport; may be anything.
        """
        try:
            message = self._accepted(reply)
        except MessageError as error:
            return self._refuse(reply, error.code)
        row = self._rows[reply.client]
        row.pop("reason", None)
        self._answered.add(reply.client)
        if message is None:
            facts = {"status": reply.status, "reason": reply.reason, "detail": reply.detail}
            row |= {key: text for key, text in facts.items() if text}
            return Verdict(reply.client, True)
        row |= {name: message.metrics[name] for name in _METRICS if name in message.metrics}
        row |= {"num_examples": message.num_examples, "steps": int(message.metrics.get("steps", row.get("steps", 0)))}
        row["up_bytes"] = row.get("up_bytes", 0) + len(reply.payload)
        row["up_container_bytes"] = row.get("up_container_bytes", 0) + container_bytes(reply.payload)
        row["status"] = "ok" if message.num_examples else "withheld" if message.status == "withheld" else "empty"
        return Verdict(reply.client, True, message)

    def again(
        self, wanted: Mapping[str, Wanted], down_bytes: Mapping[str, int], down_tensor_bytes: Mapping[str, int]
    ) -> None:
        """Opens another exchange of the same round with some of the clients; their bytes add up.

        Args:
            wanted: by client asked now, what its reply must be.
            down_bytes: by client asked now, the bytes serialised for it.
            down_tensor_bytes: how many of these were tensors.
        """
        self._wanted, self._answered = wanted, set()
        for name, size in down_bytes.items():
            row = self._rows[name]
            row["status"] = "late"
            row["down_bytes"] += size
            row["down_container_bytes"] += size - down_tensor_bytes[name]

    def settle(self, clients: Iterable[str]) -> None:
        """Notes that these clients' updates counted, whatever became of their last exchange."""
        for name in clients:
            row = self._rows[name]
            if row["status"] != "ok":
                row |= {"status": "ok", "detail": f"was {row['status']} after its update had come"}

    def rows(self) -> list[dict[str, Any]]:
        """Gives one row a client, sorted by name; what is not known has no key."""
        return [self._rows[client] for client in sorted(self._rows)]

    def valid(self) -> int:
        """Counts the accepted replies, those of clients without examples included."""
        return sum(row["status"] in VALID for row in self._rows.values())

    def counted(self) -> list[str]:
        """Lists the clients whose update is in the round's, if it makes one."""
        return [row["name"] for row in self.rows() if row["status"] == "ok"]

    def withheld(self) -> bool:
        """Says whether a client has examples, but too few to share."""
        return any(row["status"] == "withheld" for row in self._rows.values())

    def mean_loss(self) -> float | None:
        """Gives the clients' training loss weighted by examples, in sorted order; None without any."""
        trained = [row for row in self.rows() if row["status"] == "ok" and "loss" in row]
        pairs = [(row["loss"], row["num_examples"]) for row in trained]
        total = sum(weight for _, weight in pairs)
        return sum(loss * weight for loss, weight in pairs) / total if total else None

    def why_no_quorum(self, quorum: int, few: str = "") -> str:
        """Says why the valid replies are too few for a round to count; empty if they are enough.

        Args:
            quorum: how many it needs.
            few: why no more clients were asked.
        """
        valid = self.valid()
        if valid >= quorum:
            return ""
        first = self.first_fault()
        causes = [f"first {first}" if first else "", few if len(self._rows) < quorum else ""]
        return ", ".join(filter(None, [f"{valid} valid replies are fewer than quorum = {quorum}", *causes]))

    def first_fault(self) -> str:
        """Says in a few words why the first client without a valid reply has none; empty if all have one."""
        for row in self.rows():
            if row["status"] not in VALID:
                words = [row["status"], row.get("reason", ""), row.get("detail", "")]
                return f'"{row["name"]}" ({", ".join(dict.fromkeys(word for word in words if word))})'
        return ""

    def _accepted(self, reply: Reply) -> Message | None:
        """The valid message of a reply; None if the transport says there is none; raises what is refused."""
        if reply.client not in self._wanted:
            raise MessageError("unknown-client", "A reply came from a client that was not asked.")
        message = None
        if reply.status == "ok":
            message = self._wanted[reply.client].read(reply.payload, reply.client)
        if reply.client in self._answered:
            raise MessageError("duplicate", f'Client "{reply.client}" has already answered.')
        return message

    def _refuse(self, reply: Reply, code: str) -> Verdict:
        self.refused[code] = self.refused.get(code, 0) + 1
        if reply.client not in self._rows or reply.client in self._answered:
            return Verdict(reply.client, False)
        row = self._rows[reply.client]
        row["reason"] = code
        if code == "stale-round":  # a reply to an earlier question; the one to this question may still come
            return Verdict(reply.client, False)
        self._answered.add(reply.client)
        row |= {"status": "refused", "up_bytes": row.get("up_bytes", 0) + len(reply.payload)}
        return Verdict(reply.client, True)
