"""A client's whole part of a round: read what came, train, and write what leaves as the settings say."""

from __future__ import annotations

import secrets
from dataclasses import replace

import torch

from fednl.errors import MessageError
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.coding import decode, encode
from fednl.federation.exchange import Exchange, PrivacySettings
from fednl.federation.local import LocalPlan, OnProgress, Problem, train_locally
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, finite, shortened, subtract
from fednl.federation.privacy import noisy
from fednl.federation.secure import STAGES, answer, hold, layout
from fednl.seeding import seed_of

SECRET = "privacy/secret"
"""What a client's state holds once it has answered under local noise."""


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
        exchange: how updates travel and what hides them. Behind masks, the reply to the rules holds two keys, and the
            update follows in the exchanges that `fednl.federation.secure` describes.
        on_step: is told `{"step", "steps", "loss"}` after every step.

    Returns:
        The reply as it is to leave, and the state for the next round.

    Raises:
        MessageError: as `train_locally`; or code `non-finite`, as NaN behind a mask would spoil everybody's sum.
        DataError: as `train_locally`.
    """
    if received.coding in STAGES:
        sent, held = answer(received.coding, received.extra, state, received.round, exchange.privacy.secure_range)
        return replace(received, params={}, extra=sent, num_examples=1, metrics={}, status="ok"), held
    opened = decode(received)
    traffic, privacy = exchange.traffic, exchange.privacy
    reply, new_state = train_locally(algorithm, problem, opened, state, plan, on_step, privacy.min_examples)
    start = algorithm.returns(opened.params)
    if privacy.mode != "none" or privacy.secure:
        reply = _counted_once(reply)
    if privacy.secure:
        return _behind_masks(reply, start, new_state, privacy)
    if privacy.mode == "local" and reply.num_examples:
        new_state = _with_secret(new_state, privacy, reply)
        reply = replace(reply, params=_hidden(reply, start, privacy, new_state))
    return encode(reply, traffic.up_coding, start, new_state, traffic.error_feedback)


def _counted_once(reply: Message) -> Message:
    """The reply without what is measured on private data beside the rules: no noise would cover that."""
    metrics = {name: value for name, value in reply.metrics.items() if name == "steps"}
    return replace(reply, num_examples=min(1, reply.num_examples), metrics=metrics)


def _with_secret(state: ClientState, privacy: PrivacySettings, reply: Message) -> ClientState:
    """The state with the client's own secret in it, from which its noise comes in every round."""
    if SECRET in state:
        return state
    fixed = privacy.noise_seed
    arm = reply.run.partition("/")[2]  # what follows the run's own name
    secret = secrets.randbits(62) if fixed is None else seed_of(fixed, f"privacy {arm}", reply.client)
    return {**state, SECRET: torch.tensor(secret, dtype=torch.int64)}


def _behind_masks(
    reply: Message, start: Params, state: ClientState, privacy: PrivacySettings
) -> tuple[Message, ClientState]:
    """The reply that shows keys only; the change stays in the state until the masked sum asks for it."""
    keys = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in layout(STAGES[0], 0, 0).items()}
    if reply.num_examples:
        change = subtract(reply.params, start)
        if not finite(change):
            raise MessageError("non-finite", "Training gave NaN or infinity, so this client takes no part in the sum.")
        if privacy.mode == "central":
            change = shortened(change, privacy.clip)
        keys, state = hold(change, state, reply.round)
    return replace(reply, params={}, extra=keys, coding=STAGES[0]), state


def _hidden(reply: Message, start: Params, privacy: PrivacySettings, state: ClientState) -> Params:
    return noisy(reply.params, start, privacy, int(state[SECRET]), reply.client, reply.round, reply.attempt)
