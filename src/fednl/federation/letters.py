"""What each client is sent in a round, how large that is, and what its reply must be."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from fednl.federation.coding import encode, wire_layout
from fednl.federation.ledger import VALID, Ledger
from fednl.federation.lora_ranks import Ranks
from fednl.federation.message import LEAST_KEPT, Message
from fednl.federation.params import Params, count
from fednl.federation.record import Federation, Point
from fednl.federation.secure import STAGES, layout
from fednl.federation.validate import Wanted


def message_of(fed: Federation, point: Point) -> Message:
    """Gives the server's message of the next round, to no client in particular."""
    shared = {name: point.params[name] for name in fed.names}
    beside = fed.algorithm.broadcast(shared, point.server_state)
    message = Message(shared, beside, round=point.round + 1, run=fed.run_name, adapters=fed.adapters)
    unsettled = point.round - point.settled
    # A client of before this field reads no message that has it, so it is there only where somebody needs it.
    told = unsettled if unsettled >= LEAST_KEPT - 1 else 0
    return replace(message, attempt=point.attempt, unsettled=told, begun=point.begun)


class Letters:
    """Makes of the server's message what each client is sent: by its rank, and by what it has already.

    Args:
        fed: the federation.
        point: where the run stands before the round.
        message: as `message_of` gives it.
    """

    def __init__(self, fed: Federation, point: Point, message: Message) -> None:
        algorithm = fed.algorithm
        self._fed, self._point, self._told, self._message = fed, point, frozenset(point.told), message
        self._ranks = Ranks(fed.settings.lora_ranks)
        self._made = algorithm.made(point.server_state)
        self._given = {name: point.params[name] for name in algorithm.given(point.params)}

    @cached_property
    def _once(self) -> Params:
        return self._fed.algorithm.once(self._point.server_state)

    def to(self, client: str) -> tuple[Message, Wanted]:
        """Gives what a client is sent, as it is on the wire, and what its reply must be."""
        algorithm, message, traffic = self._fed.algorithm, self._message, self._fed.exchange.traffic
        offer = algorithm.offer(message.params, self._ranks.of(client))
        counted = self._point.counted.get(client, 0)
        once = {} if client in self._told else self._once
        beside = algorithm.to_client({**message.extra, **once}, client, self._point.server_state, counted)
        beside |= self._given if self._made and client not in self._told else {}
        letter = replace(message, params=offer, extra=beside, client=client)
        if algorithm.traits.passes_on:
            letter = replace(letter, counted=counted)
        sent = encode(letter, traffic.down, {}, {})[0]
        extra = {**algorithm.extra(offer), **({} if self._made else self._given)}
        apart = frozenset(algorithm.apart(extra))
        returns = algorithm.returns(offer)
        return sent, Wanted(returns, extra, message.round, message.run, traffic.up_coding, apart, message.attempt)


def told_after(fed: Federation, point: Point, ledger: Ledger, news: bool) -> tuple[str, ...]:
    """Lists who has what the server gives once, after a round: whoever answers without fault keeps what it was sent.

    What came of others is kept by who trained: without examples, `start` is not called.

    Args:
        fed: the federation.
        point: where the run stood before the round.
        ledger: the round's.
        news: whether the round brought what nobody has yet.
    """
    gives = fed.algorithm.traits.passes_on or fed.algorithm.given(point.params)
    if news or not gives or not fed.algorithm.made(point.server_state):
        return ()
    good = ("ok",) if fed.algorithm.traits.passes_on else VALID
    faultless = {row["name"]: row["status"] in good for row in ledger.rows()}
    kept = {client for client in point.told if faultless.get(client, True)}
    return tuple(sorted(kept | {client for client, keeps in faultless.items() if keeps}))


def tell_sizes(fed: Federation, point: Point) -> None:
    """Tells, before the first round, how large its messages are as serialised: those of the client with the largest.

    Where nothing is shared, or there is one client, nothing is told. Of a masked sum, only the large messages count.

    Args:
        fed: the federation.
        point: where the run stands; after the first round nothing is told.
    """
    clients = fed.transport.clients()
    if point.round or not fed.algorithm.traits.shares or len(clients) < 2:
        return
    letters, ranks = Letters(fed, point, message_of(fed, point)), Ranks(fed.settings.lora_ranks)
    by_rank = {ranks.of(client): client for client in sorted(clients, key=len)}
    sizes = [
        (sent.size_bytes, _reply(fed, sent, wanted).size_bytes) for sent, wanted in map(letters.to, by_rank.values())
    ]
    down, up = (f"{max(column) / 1e6:.3g} MB" for column in zip(*sizes, strict=True))
    text = f"round 1 sends each client up to {down} and takes up to about {up} back, as serialised; "
    text += f"{fed.asked_per_round} of {len(clients)} clients are asked"
    fed.tell("note", round=1, rounds=fed.training.rounds, text=text)


def _reply(fed: Federation, sent: Message, wanted: Wanted) -> Message:
    """A reply of the size that a client's will have, but for what it measures."""
    rules, extra = wire_layout(wanted.rules, wanted.coding)
    extra |= wanted.extra
    if fed.exchange.privacy.secure:
        rules, extra = {}, layout(STAGES[2], fed.asked_per_round, count(wanted.rules))
    return replace(sent, params=_blank(rules), extra=_blank(extra))


def _blank(tensors: Params) -> Params:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
