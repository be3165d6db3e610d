"""What each client is sent in a round, and what its reply must be."""

from __future__ import annotations

from dataclasses import replace

from fednl.federation.coding import encode
from fednl.federation.lora_ranks import Ranks
from fednl.federation.message import Message
from fednl.federation.record import Federation, Point
from fednl.federation.validate import Wanted


def message_of(fed: Federation, point: Point) -> Message:
    """Gives the server's message of the next round, to no client in particular."""
    shared = {name: point.params[name] for name in fed.names}
    beside = fed.algorithm.broadcast(shared, point.server_state)
    return Message(shared, beside, round=point.round + 1, run=fed.run_name, adapters=fed.adapters)


class Letters:
    """Makes of the server's message what each client is sent: by its rank, and by what it has already.

    Args:
        fed: the federation.
        point: where the run stands before the round.
        message: as `message_of` gives it.
    """

    def __init__(self, fed: Federation, point: Point, message: Message) -> None:
        algorithm = fed.algorithm
        self._fed, self._told, self._message = fed, frozenset(point.told), message
        self._ranks = Ranks(fed.settings.lora_ranks)
        self._made = algorithm.made(point.server_state)
        self._given = {name: point.params[name] for name in algorithm.given(point.params)}

    def to(self, client: str) -> tuple[Message, Wanted]:
        """Gives what a client is sent, as it is on the wire, and what its reply must be."""
        algorithm, message, traffic = self._fed.algorithm, self._message, self._fed.exchange.traffic
        offer = algorithm.offer(message.params, self._ranks.of(client))
        known = algorithm.once(message.extra) if client in self._told else []
        beside = {name: tensor for name, tensor in message.extra.items() if name not in known}
        beside |= self._given if self._made and client not in self._told else {}
        sent = encode(replace(message, params=offer, extra=beside, client=client), traffic.down, {}, {})[0]
        extra = {**algorithm.extra(offer), **({} if self._made else self._given)}
        apart = frozenset(algorithm.apart(extra))
        returns = algorithm.returns(offer)
        return sent, Wanted(returns, extra, message.round, message.run, traffic.up_coding, apart)
