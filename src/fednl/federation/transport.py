"""The narrow waist: ask clients, collect replies. Here in this process; worker processes are in `workers`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from fednl.federation.frames import describe_failure
from fednl.federation.message import Message
from fednl.federation.params import ClientState
from fednl.federation.wire import pack, unpack

OnClient: TypeAlias = Callable[[str, dict[str, Any]], None]
"""Is told (client, facts) while a client works."""

Endpoint: TypeAlias = Callable[
    [str, Message, ClientState, Callable[[dict[str, Any]], None]], tuple[Message, ClientState]
]
"""A client's side: (client, message, state, on_progress) -> (reply, new state)."""


@dataclass(frozen=True)
class Reply:
    """What came back from a client, or that nothing will.

    Args:
        client: who the transport knows has sent it; not what the bytes claim.
        payload: the serialised message; empty unless `status` is `"ok"`.
        status: `"ok"`, `"failed"` (the client raised), `"lost"` (its process or connection ended) or `"late"` (it was
            given up at its deadline).
        reason: a short reason code, such as the type of the error.
        detail: a sentence or a place in the code; never private text.
    """

    client: str
    payload: bytes = b""
    status: str = "ok"
    reason: str = ""
    detail: str = ""

    @classmethod
    def failed(cls, client: str, facts: Mapping[str, str]) -> Reply:
        """Makes the reply of a client that raised, from `describe_failure`."""
        reason = facts.get("code") or facts.get("type", "")
        return cls(client, b"", "failed", reason, facts.get("message") or facts.get("where", ""))


class Transport(Protocol):
    """What the round loop needs to know of any network."""

    def clients(self) -> list[str]:
        """Lists the clients that can be asked, by stable name, sorted."""
        ...

    def examples(self) -> dict[str, int]:
        """Gives each client's training examples where they are known; the others are left out."""
        ...

    def send(self, client: str, message: Message) -> int:
        """Asks a client, and gives the number of bytes serialised for it."""
        ...

    def replies(self, deadline_s: float | None, on_progress: OnClient | None = None) -> Iterator[Reply]:
        """Gives replies as they come, until all asked have answered or been given up.

        A client that is given up while others are waited for is told of, as `"late"`: the loop keeps nothing back for
        it then.

        Args:
            deadline_s: seconds that a client has, counted from when it is asked to work; None for no deadline. Over a
                network all are asked at once, so it is one clock for the round. Where clients take turns on one
                machine, each has its own, from when its turn begins.
            on_progress: is told (client, facts) while a client works.
        """
        ...

    def states(self) -> dict[str, ClientState]:
        """Gives the clients' private states where this process holds them, for a checkpoint."""
        ...

    def restore(self, states: Mapping[str, ClientState]) -> None:
        """Puts the clients' private states back; a transport whose clients hold their own ignores it."""
        ...

    def close(self) -> None:
        """Ends the transport and everything it started."""
        ...


class SimulatedTransport:
    """What transports on this machine share: who the clients are, who was asked, and their states as bytes.

    Args:
        clients: names, or name to training examples.
    """

    def __init__(self, clients: Iterable[str] | Mapping[str, int]) -> None:
        self._clients = sorted(clients)
        self._examples = dict(clients) if isinstance(clients, Mapping) else {}
        self._asked: dict[str, bytes] = {}
        # As bytes nothing is shared between a client and the server, or between two rounds.
        self._states: dict[str, bytes] = {}
        self._no_state = pack({})

    def clients(self) -> list[str]:
        """Lists the clients, sorted."""
        return list(self._clients)

    def examples(self) -> dict[str, int]:
        """Gives each client's training examples, if they were given."""
        return dict(self._examples)

    def send(self, client: str, message: Message) -> int:
        """Notes that a client is asked; it works when replies are collected.

        Args:
            client: its name.
            message: what it is sent, as bytes, so nothing is shared.

        Returns:
            The bytes serialised.
        """
        payload = message.to_bytes()
        self._asked[client] = payload
        return len(payload)

    def states(self) -> dict[str, ClientState]:
        """Gives the clients' private states; copies."""
        return {client: unpack(state)[0] for client, state in sorted(self._states.items())}

    def restore(self, states: Mapping[str, ClientState]) -> None:
        """Replaces all private states, and forgets who was asked.

        Args:
            states: by client; not modified.
        """
        self._asked.clear()
        self._states = {client: pack(state) for client, state in states.items()}

    def close(self) -> None:
        """Has nothing to end here."""

    def _take_asked(self) -> list[tuple[str, bytes, bytes]]:
        """Who was asked since the last time, in sorted order, with message and state as bytes."""
        asked, self._asked = sorted(self._asked.items()), {}
        return [(client, payload, self._states.get(client, self._no_state)) for client, payload in asked]


class InProcessTransport(SimulatedTransport):
    """Runs clients one after another in this process, through the same bytes as any network.

    Args:
        endpoint: what a client does with a message and its state.
        clients: names, or name to training examples.
    """

    def __init__(self, endpoint: Endpoint, clients: Iterable[str] | Mapping[str, int]) -> None:
        super().__init__(clients)
        self._endpoint = endpoint

    def replies(self, deadline_s: float | None, on_progress: OnClient | None = None) -> Iterator[Reply]:
        """Lets the asked clients work in sorted order and gives each one's reply.

        A client that raises has failed, and the round goes on. One that ends after its deadline is late, its state
        unchanged; it is waited for, as this process cannot end it.

        Args:
            deadline_s: seconds from when a client begins, for each anew; None for no deadline.
            on_progress: is told (client, facts) while a client works.
        """
        for client, payload, state in self._take_asked():
            began_s = time.monotonic()
            try:
                reply, new_state = call_endpoint(self._endpoint, client, payload, state, on_progress)
            except Exception as error:
                yield Reply.failed(client, describe_failure(error))
                continue
            if deadline_s is not None and time.monotonic() - began_s > deadline_s:
                yield Reply(client, status="late")
                continue
            self._states[client] = new_state
            yield Reply(client, reply)


def call_endpoint(
    endpoint: Endpoint, client: str, payload: bytes, state: bytes, on_progress: OnClient | None = None
) -> tuple[bytes, bytes]:
    """Calls an endpoint with bytes: the message and the state come out of bytes and go back into bytes.

    Args:
        endpoint: the client's side.
        client: its name.
        payload: the serialised message.
        state: the serialised state.
        on_progress: is told (client, facts).

    Returns:
        The serialised reply and state.
    """

    def tell(facts: dict[str, Any]) -> None:
        if on_progress is not None:
            on_progress(client, facts)

    reply, new_state = endpoint(client, Message.from_bytes(payload), unpack(state)[0], tell)
    return reply.to_bytes(), pack(new_state)
