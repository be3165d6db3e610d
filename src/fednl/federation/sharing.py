"""A client's whole part of a round: read what came, train, and write what leaves as the settings say."""

from __future__ import annotations

from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.coding import decode, encode
from fednl.federation.exchange import Exchange
from fednl.federation.local import LocalPlan, OnProgress, Problem, train_locally
from fednl.federation.message import Message
from fednl.federation.params import ClientState


def take_part(
    algorithm: FedAvg,
    problem: Problem,
    received: Message,
    state: ClientState,
    plan: LocalPlan,
    exchange: Exchange,
    on_step: OnProgress | None = None,
) -> tuple[Message, ClientState]:
    """Does a client's part of a round between two messages as they are on the wire.

    Args:
        algorithm: whose hooks are called.
        problem: the client's data and loss.
        received: the server's message as it came. Not modified.
        state: what the client kept from earlier rounds. Not modified.
        plan: steps, rate, schedule, clipping.
        exchange: how updates travel.
        on_step: is told `{"step", "steps", "loss"}` after every step.

    Returns:
        The reply as it is to leave, and the state for the next round.

    Raises:
        MessageError: as `train_locally`.
        DataError: as `train_locally`.
    """
    opened = decode(received)
    reply, new_state = train_locally(algorithm, problem, opened, state, plan, on_step)
    traffic = exchange.traffic
    return encode(reply, traffic.up_coding, opened.params, new_state, traffic.error_feedback)
