"""A client's whole part of a round: read what came, train, and write what leaves as the settings say."""

from __future__ import annotations

import secrets
from dataclasses import replace

import torch

from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.coding import decode, encode
from fednl.federation.exchange import Exchange, PrivacySettings
from fednl.federation.local import LocalPlan, OnProgress, Problem, train_locally
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params
from fednl.federation.privacy import noisy
from fednl.seeding import seed_of

_SECRET = "privacy/secret"


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
        exchange: how updates travel and what hides them.
        on_step: is told `{"step", "steps", "loss"}` after every step.

    Returns:
        The reply as it is to leave, and the state for the next round.

    Raises:
        MessageError: as `train_locally`.
        DataError: as `train_locally`.
    """
    opened = decode(received)
    traffic, privacy = exchange.traffic, exchange.privacy
    reply, new_state = train_locally(algorithm, problem, opened, state, plan, on_step, privacy.min_examples)
    start = algorithm.returns(opened.params)
    if privacy.mode != "none" or privacy.secure:
        reply = _counted_once(reply)
    if privacy.mode == "local" and reply.num_examples:
        new_state = _with_secret(new_state, privacy, reply.client)
        reply = replace(reply, params=_hidden(reply, start, privacy, new_state))
    return encode(reply, traffic.up_coding, start, new_state, traffic.error_feedback)


def _counted_once(reply: Message) -> Message:
    """The reply without what is measured on private data beside the rules: no noise would cover that."""
    metrics = {name: value for name, value in reply.metrics.items() if name == "steps"}
    return replace(reply, num_examples=min(1, reply.num_examples), metrics=metrics)


def _with_secret(state: ClientState, privacy: PrivacySettings, client: str) -> ClientState:
    """The state with the client's own secret in it, from which its noise comes in every round."""
    if _SECRET in state:
        return state
    fixed = privacy.noise_seed
    secret = secrets.randbits(62) if fixed is None else seed_of(fixed, "privacy", client)
    return {**state, _SECRET: torch.tensor(secret, dtype=torch.int64)}


def _hidden(reply: Message, start: Params, privacy: PrivacySettings, state: ClientState) -> Params:
    return noisy(reply.params, start, privacy, int(state[_SECRET]), reply.client, reply.round)
