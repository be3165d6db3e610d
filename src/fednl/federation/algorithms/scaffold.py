"""SCAFFOLD: every client corrects its gradient by how it differs from everybody's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field

from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.section import Section

if TYPE_CHECKING:
    import torch

    from fednl.federation.local import Problem
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params


class ScaffoldSettings(Section):
    """The `[scaffold]` section.

    Args:
        correction: the part of the correction that is applied, from 0 to 1; 1 is SCAFFOLD, 0 is FedAvg.
    """

    correction: float = Field(default=1.0, ge=0, le=1)


class Scaffold(FedAvg):
    """Steps along g + c - c_k, where c_k is a client's own mean gradient and c the mean of all clients'.

    Clients with different data then agree on where to go, and the average no longer settles between their own
    optima. A message carries a control variate of the size of each shared rule, both ways, so a round costs
    twice FedAvg's bytes. A client keeps c_k in its state as `control/NAME`, with its `weight` in c, and what it
    sent last, in the round `sent`, as `pending/NAME` and `sent/weight` until it hears which of its replies the server
    counted last: after a round without a quorum, or one in which its reply was lost or refused, c_k is the old one.

    As published, c_k becomes c_k - c + (w_sent - w_k) / (steps rate). That is the mean of a round's data
    gradients under plain SGD, but no gradient at all under AdamW; here that mean is taken itself. A client's
    weight in c is that in the mean of the rules, and changes with it from task to task. c is over the clients
    heard so far: one that takes part for the first time is not corrected, and counts in c from then on (as
    published it would start from c_k = 0). Settings: `ScaffoldSettings`.

    Source: Karimireddy et al. 2020 (arXiv 1910.06378), Algorithm 1, option II; the three choices above are ours.
    """

    Settings: ClassVar[type[BaseModel]] = ScaffoldSettings
    traits: ClassVar[Traits] = Traits(sends_extra=True)

    def extra(self, params: Params) -> Params:
        """Names a control variate for each shared rule, and `held`.

        In a reply, `held` is the weight with which c holds an earlier c_k of this client, in parts of the weight it
        has now: 1 while that does not change, 0 if c holds none. From the server it is the last round whose reply of
        this client c holds, int64, 0 for none.

        Args:
            params: the shared rules.
        """
        import torch

        names = [name for name in self.shared(params) if name in set(self.trainable(params))]
        control = {f"control/{name}": torch.zeros_like(params[name]) for name in names}
        return {**control, "held": torch.zeros((), dtype=torch.float64)}

    def broadcast(self, params: Params, server_state: ClientState) -> Params:
        """Gives c as `control/NAME`; nothing before the first round that counts.

        Args:
            params: the shared rules that go out.
            server_state: what `server_step` gave.
        """
        return {name: tensor for name, tensor in server_state.items() if name.startswith("control/")}

    def to_client(self, beside: Params, client: str, server_state: ClientState, counted: int) -> Params:
        """Gives c, and as `held` which of the client's own replies is in it.

        Args:
            beside: what `broadcast` gave.
            client: its name.
            server_state: what `server_step` gave.
            counted: the last round whose update holds a reply of this client; 0 for none.
        """
        import torch

        return {**beside, "held": torch.tensor(counted)}

    def start(self, received: Message, state: ClientState, problem: Problem) -> tuple[Params, ClientState]:
        """Starts as FedAvg does; takes up the c_k that was sent last, if the server counted that reply.

        Args:
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss.
        """
        params, state = super().start(received, state, problem)
        kept = {name: tensor for name, tensor in state.items() if not name.startswith(("pending/", "sent"))}
        if "held" in received.extra and "sent" in state and int(received.extra["held"]) == int(state["sent"]):
            sent = {name.removeprefix("pending/"): t for name, t in state.items() if name.startswith("pending/")}
            kept |= {f"control/{name}": tensor for name, tensor in sent.items()}
            kept |= {"weight": state["sent/weight"]} if "sent/weight" in state else {}
        return params, kept

    def gradient(self, params: Params, batch: Any, received: Message, state: ClientState, problem: Problem) -> Params:
        """Gives the batch's gradient plus c - c_k for the shared rules.

        Args:
            params: the rules now.
            batch: one item of `problem.batches`.
            received: the server's message, with c.
            state: the client's state, with c_k.
            problem: the client's data and loss.
        """
        grads = super().gradient(params, batch, received, state, problem)
        return grads | {name: grads[name] + shift for name, shift in self._shifts(received, state).items()}

    def after_step(self, before: Params, after: Params, grads: Params, state: ClientState) -> ClientState:
        """Adds the step's corrected gradient to the round's sum.

        Args:
            before: the rules before the step.
            after: the rules after it.
            grads: the gradient it took, before clipping.
            state: the client's state.
        """
        sums = {f"sum/{name}": state.get(f"sum/{name}", 0.0) + grads[name] for name in self.shared(grads)}
        steps = state.get("sum/steps", next(iter(grads.values())).new_zeros(())) + 1
        return {**state, **sums, "sum/steps": steps}

    def finish(
        self, params: Params, received: Message, state: ClientState, problem: Problem
    ) -> tuple[Message, ClientState]:
        """Makes the new c_k, and sends by how much its share of c changes; all of it while c holds none of this client.

        Args:
            params: the rules after the last local step.
            received: the server's message.
            state: the client's state, with the round's sum.
            problem: the client's data and loss.
        """
        message, state = super().finish(params, received, state, problem)
        extra, shifts = self.extra(message.params), self._shifts(received, state)
        kept = {name: tensor for name, tensor in state.items() if not name.startswith("sum/")}
        weight = extra["held"].new_tensor(float(self.weigh(problem.num_examples)))
        share = state.get("weight", weight) / weight
        for name in [key.removeprefix("control/") for key in extra if key != "held"]:
            mean = state[f"sum/{name}"] / state["sum/steps"] - shifts.get(name, 0.0)
            old = (state.get(f"control/{name}", mean * 0).double() * share).to(mean.dtype)
            extra[f"control/{name}"] = mean - old
            kept[f"pending/{name}"] = _moved(old, mean - old, 1.0)
        extra["held"] = extra["held"] + share * float(any(name in state for name in extra))
        kept |= {"sent": extra["held"].new_tensor(received.round).long(), "sent/weight": weight}
        return replace(message, extra=extra), kept

    def server_step(self, params: Params, combined: Message, server_state: ClientState) -> tuple[Params, ClientState]:
        """Takes the mean of the rules, and moves c by what the clients' c_k moved.

        Args:
            params: the shared rules that were sent out.
            combined: the combined replies.
            server_state: `control/NAME`, and the `examples` it is the mean over; empty at first.
        """
        new, _ = super().server_step(params, combined, server_state)
        if "held" not in combined.extra:
            return new, server_state
        known = combined.extra["held"]
        before = server_state.get("examples", known * 0)
        examples = before + ((1 - known) * combined.num_examples).round()
        state: ClientState = {"examples": examples}
        for name, change in combined.extra.items():
            if name != "held":
                # With n all weights: n c = n_before c_before + the sum of what came, over the clients heard so far.
                old = server_state.get(name, change * 0).double() * float(before / examples)
                state[name] = _moved(old, change, combined.num_examples / float(examples))
        return new, state

    def _shifts(self, received: Message, state: ClientState) -> Params:
        """The correction (c - c_k) by rule; empty until both are there, and where no correction is wanted."""
        part = self.settings.correction
        known = [name for name in received.extra if name.startswith("control/") and name in state] if part else []
        return {name.removeprefix("control/"): (received.extra[name] - state[name]) * part for name in known}


def _moved(old: torch.Tensor, change: torch.Tensor, scale: float) -> torch.Tensor:
    """What old becomes; client and server round alike, so that a lone client's c_k is c to the bit."""
    return (old.double() + change.double() * scale).to(change.dtype)
