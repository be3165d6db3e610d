"""FedALA: every client learns, element by element, how much of the server's rules it takes over."""

from __future__ import annotations

from functools import partial
from statistics import pstdev
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field

from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.section import Section

if TYPE_CHECKING:
    from fednl.federation.local import Problem
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params

LAST_LOSSES = 10
"""How many of the latest passes' losses tell whether the weights have settled."""


class FedAlaSettings(Section):
    """The `[fedala]` section.

    Args:
        weight_lr: step size of the mixing weights, at least 0; 0 leaves them at 1, which is FedAvg.
        steps: batches in one pass over the weights, at least 1.
        threshold: the first learning of the weights ends when the losses of its last ten passes have a standard
            deviation below this, in the loss's unit (nats per answer token).
        most_passes: the first learning ends after this many passes at the latest; at least 1.
    """

    weight_lr: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    steps: int = Field(default=8, ge=1)
    threshold: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    most_passes: int = Field(default=20, ge=1)


class FedAla(FedAvg):
    """Starts a round from a mixture of the client's own last rules and the server's, weighted element by element.

    w = own + (sent - own) W, with W in [0, 1] learned on the client's data before its local steps by
    W = clip(W - weight_lr g (sent - own), 0, 1), where g is the loss's gradient at w. W starts at 1 and lasts from
    round to round, as `mix/NAME` in the client's state. The server averages as FedAvg does.

    The client's own rules, those after its last local step, are in its state as `private/NAME`, the shared ones
    too: `fednl.federation.params.personal` gives them, and what is measured for a client is measured on them.
    In a client's first round there are none, and it takes what was sent. All shared rules are mixed; the paper's
    restriction to the top layers is for networks with many more numbers. Settings: `FedAlaSettings`.

    Source: Zhang et al. 2023 (arXiv 2212.01197), eqs. 4 to 6 and Algorithm 1, whose threshold is the default. Ours: a
    number of batches, the same in each pass of a round, in place of 80% of the data; the limit on passes; that a
    client is measured on its own rules, not on its next mixture; rules that local steps do not move are taken as
    sent.
    """

    Settings: ClassVar[type[BaseModel]] = FedAlaSettings
    traits: ClassVar[Traits] = Traits(keeps_own=True)

    def start(self, received: Message, state: ClientState, problem: Problem) -> tuple[Params, ClientState]:
        """Learns W, and gives the mixture to start from.

        Args:
            received: the server's message.
            state: the client's state, with its own rules and W.
            problem: the client's data and loss.
        """
        from fednl.federation.params import equal

        own, _ = super().start(received, state, problem)
        old = {name: own[name] for name in self._mixed(own, received)}
        sent = {name: received.params[name] for name in old}
        if self.settings.weight_lr == 0 or equal(old, sent):
            return {**own, **received.params}, state
        weights = self._learn({**own, **received.params}, old, sent, state, problem)
        start = {**own, **received.params, **mixture(old, sent, weights)}
        return start, {**state, **{f"mix/{name}": weight for name, weight in weights.items()}}

    def finish(
        self, params: Params, received: Message, state: ClientState, problem: Problem
    ) -> tuple[Message, ClientState]:
        """Sends the shared rules, and keeps a copy of all as the client's own.

        Args:
            params: the rules after the last local step.
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss.
        """
        from fednl.federation.params import copy

        message, state = super().finish(params, received, state, problem)
        return message, {**state, **copy({f"private/{name}": tensor for name, tensor in params.items()})}

    def _mixed(self, own: Params, received: Message) -> list[str]:
        """The rules that are mixed: those that were sent and that local steps move."""
        return [name for name in self.trainable(own) if name in received.params]

    def _learn(self, rules: Params, old: Params, sent: Params, state: ClientState, problem: Problem) -> Params:
        """W after this round's passes: until the loss settles when it is learned first, one pass later."""
        from fednl.federation.params import value_and_gradient

        first = not any(f"mix/{name}" in state for name in sent)
        weights = {name: state.get(f"mix/{name}", sent[name] * 0 + 1) for name in sent}
        batches = list(problem.batches("mix", self.settings.steps))
        losses: list[float] = []
        for _ in range(self.settings.most_passes if first else 1):
            nats = 0.0
            for batch in batches:
                at = {**rules, **mixture(old, sent, weights)}
                loss, grads = value_and_gradient(partial(problem.loss, batch=batch), at, list(sent))
                nats += float(loss)
                steps = {name: self.settings.weight_lr * grads[name] * (sent[name] - old[name]) for name in sent}
                weights = {name: (weight - steps[name]).clamp(0, 1) for name, weight in weights.items()}
            losses.append(nats / max(1, len(batches)))
            if len(losses) >= LAST_LOSSES and pstdev(losses[-LAST_LOSSES:]) < self.settings.threshold:
                break
        return weights


def mixture(old: Params, sent: Params, weights: Params) -> Params:
    """Gives old + (sent - old) W, name by name: old to the bit at W = 0, sent at 1, and never outside the two.

    Args:
        old: the client's own rules.
        sent: the server's, of the same names and shapes.
        weights: W, in [0, 1], of the same names and shapes.
    """
    import torch

    mixed = {}
    for name, own in old.items():
        low, high = torch.minimum(own, sent[name]), torch.maximum(own, sent[name])
        mixed[name] = torch.lerp(own, sent[name], weights[name]).clamp(low, high)
    return mixed
