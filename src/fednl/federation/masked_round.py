"""The server's side of a round of masked sums: four exchanges over the transport, ledger and checks of any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fednl.federation.coding import encode
from fednl.federation.combine import NO_EXAMPLES
from fednl.federation.exchange import FEWEST_MASKED
from fednl.federation.ledger import Ledger
from fednl.federation.masked_sum import MaskedSum
from fednl.federation.message import Message
from fednl.federation.params import Params, count, max_abs
from fednl.federation.privacy import PrivateSum
from fednl.federation.record import Federation
from fednl.federation.secure import STAGES, layout, resolution
from fednl.federation.transport import OnClient
from fednl.federation.validate import Wanted

_COARSE = 100
"""Changes of fewer resolutions than this lose a hundredth of their size and more."""


@dataclass
class MaskedMean:
    """Combines what a masked sum came to: the rules moved by the mean of the changes.

    Args:
        start: the shared rules that were sent out.
        noise: what adds noise to the sum; None for none.
    """

    start: Params
    noise: PrivateSum | None = None
    why_not: str = NO_EXAMPLES
    changes: Params = field(default_factory=dict)
    came: int = 0
    cut: int = 0

    def take(self, changes: Params, came: int, cut: int) -> None:
        """Takes the sum in.

        Args:
            changes: the sum of the changes, float64.
            came: of how many clients.
            cut: how many single numbers were larger than the range.
        """
        self.changes, self.came, self.cut, self.why_not = changes, came, cut, ""
        if self.noise is not None:
            self.noise.starting_from(self.start).add_sum(changes, came)

    def fault(self) -> str:
        """Says why there is no sum, if so."""
        return self.why_not

    def products(self) -> Params:
        """Gives nothing: the server has no single update."""
        return {}

    def result(self) -> Message:
        """Gives the combined rules."""
        if self.noise is not None:
            return self.noise.result()
        moved = {
            name: (value.double() + self.changes[name] / self.came).to(value.dtype)
            for name, value in self.start.items()
        }
        return Message(moved, num_examples=self.came)

    def facts(self) -> dict[str, float]:
        """Gives how many numbers were cut, and what the noise says of itself."""
        return {"cut_numbers": float(self.cut), **(self.noise.facts() if self.noise is not None else {})}


class MaskedRound:
    """Leads a round's clients through the four exchanges.

    Args:
        fed: the federation.
        message: the server's message of the round, to no client in particular.
        deadline_s: how long a client may take over each exchange; None for no deadline.
    """

    def __init__(self, fed: Federation, message: Message, deadline_s: float | None) -> None:
        self._fed, self._message, self._deadline_s = fed, message, deadline_s
        self._range = fed.exchange.privacy.secure_range
        self._numbers = count(message.params)
        self.ledger = Ledger({}, {}, {})

    def run(
        self, asked: list[str], mean: MaskedMean, on_step: OnClient, on_done: Callable[[str, Ledger], None]
    ) -> Ledger:
        """Asks, adds up, takes the masks off.

        Args:
            asked: who is asked.
            mean: what takes the sum.
            on_step: is told (client, facts) while clients train.
            on_done: is told (client, ledger) when one has trained.

        Returns:
            The ledger of the round.
        """
        rules = encode(self._message, self._fed.exchange.traffic.down, {}, {})[0]
        keys = {
            client: reply["keys"] for client, reply in self._ask(0, dict.fromkeys(asked, rules), 0, on_step, on_done)
        }
        if 0 < len(keys) < FEWEST_MASKED:
            mean.why_not = f"{len(keys)} clients are too few for a masked sum, which needs {FEWEST_MASKED}"
        if len(keys) < FEWEST_MASKED:
            return self.ledger
        sums = MaskedSum(keys, self._message.params, self._range)
        together = torch.stack([keys[client] for client in sums.clients])
        size = len(sums.clients)
        places = {c: self._letter(1, keys=together, position=torch.tensor(at)) for at, c in enumerate(sums.clients)}
        shares = {client: reply["shares"] for client, reply in self._ask(1, places, size)}
        if self._lost(len(shares), max(sums.needed, FEWEST_MASKED), size, "shared their secrets", mean):
            return self.ledger
        present = sums.places(shares)
        letters = {c: self._letter(2, shares=sums.letters(shares, c), present=present) for c in sorted(shares)}
        came = []
        for client, reply in self._ask(2, letters, size):
            sums.add(client, reply["masked"])
            came.append(client)
        if self._lost(len(came), max(sums.needed, FEWEST_MASKED), size, "sent masked numbers", mean):
            return self.ledger
        last = self._letter(3, present=sums.places(came))
        opened = {client: reply["opened"] for client, reply in self._ask(3, dict.fromkeys(sorted(came), last), size)}
        if self._lost(len(opened), sums.needed, size, "helped to take the masks off", mean):
            return self.ledger
        try:
            changes, cut = sums.result(opened, shares)
        except ValueError:
            mean.why_not = "the masks did not come off, as a client did not keep to the protocol"
            return self.ledger
        self.ledger.settle(came)
        self._warn(changes, len(came), cut, size)
        mean.take(changes, len(came), cut)
        return self.ledger

    def _ask(
        self,
        stage: int,
        messages: Mapping[str, Message],
        clients: int,
        on_step: OnClient | None = None,
        on_done: Callable[[str, Ledger], None] | None = None,
    ) -> Iterator[tuple[str, Params]]:
        """One exchange: sends, and gives (client, its tensors) as they come."""
        fed, coding = self._fed, STAGES[stage]
        down, sizes, wanted = {}, {}, {}
        question: dict[str, Any] = {"round": self._message.round, "run": fed.run_name, "attempt": self._message.attempt}
        one = Wanted({}, layout(coding, clients, self._numbers), coding=coding, **question)
        for client, message in messages.items():
            down[client] = fed.transport.send(client, replace(message, client=client))
            sizes[client], wanted[client] = message.tensor_bytes, one
        if stage == 0:
            self.ledger = Ledger(wanted, down, sizes)
        else:
            self.ledger.again(wanted, down, sizes)
        for reply in fed.transport.replies(self._deadline_s, on_step):
            verdict = self.ledger.judge(reply)
            if verdict.is_final and on_done is not None:
                on_done(verdict.client, self.ledger)
            if verdict.message is not None and verdict.message.num_examples:
                tensors = verdict.message.extra.items()
                yield verdict.client, {name.removeprefix("secure/"): value for name, value in tensors}

    def _letter(self, stage: int, **tensors: torch.Tensor) -> Message:
        extra = {f"secure/{name}": value for name, value in tensors.items()}
        return replace(self._message, params={}, extra=extra, coding=STAGES[stage])

    def _lost(self, left: int, needed: int, all: int, what: str, mean: MaskedMean) -> bool:
        if left < needed:
            mean.why_not = f"{left} of {all} clients {what}, and {needed} are needed for a masked sum"
        return left < needed

    def _warn(self, changes: Params, came: int, cut: int, size: int) -> None:
        """Says where the range does not fit the changes: too small cuts them, too large leaves few digits."""
        if cut:
            text = f"{cut} numbers of {came} clients were cut to secure-range = {self._range:g}: raise it"
            self._fed.tell("note", text=text)
        largest, step = max_abs(changes) / came, resolution(self._range, size)
        if largest < _COARSE * step:
            text = f"the largest mean change, {largest:.2g}, is near the resolution of secure-range = {self._range:g}, "
            self._fed.tell("note", text=text + f"{step:.2g}: lower it")
