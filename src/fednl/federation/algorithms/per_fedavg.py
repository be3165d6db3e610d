"""Per-FedAvg: rules that are good one gradient step later, on each client's own data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field

from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.section import Section

if TYPE_CHECKING:
    from fednl.federation.local import Problem
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params

_STEP = "inner-step"


class PerFedAvgSettings(Section):
    """The `[per-fedavg]` section.

    Args:
        inner_lr: size of the gradient step that a client is assumed to take when it adapts, at least 0; 0 is
            FedAvg.
    """

    inner_lr: float = Field(default=1e-2, ge=0, allow_inf_nan=False)


class PerFedAvg(FedAvg):
    """Takes every local step along the gradient at w - inner_lr grad f(w), the rules after one step of adaptation.

    This is the first-order form: the Hessian in the derivative of the adapted loss is left out. The inner and
    the outer gradient are on independent batches, so that a step costs two; the loss that is reported is the
    inner batch's at w, before adaptation. What comes out is a start: to use it, take a gradient step on the
    client's data, which evaluation here does not. Settings: `PerFedAvgSettings`.

    Source: Fallah, Mokhtari and Ozdaglar 2020 (arXiv 2002.07948), Algorithm 1, in its first-order form (FO);
    AdamW for the outer step and the default are ours.
    """

    Settings: ClassVar[type[BaseModel]] = PerFedAvgSettings
    traits: ClassVar[Traits] = Traits(one_client_is_local=False)

    def start(self, received: Message, state: ClientState, problem: Problem) -> tuple[Params, ClientState]:
        """Starts as FedAvg does, and counts the round's steps, as each has an inner batch of its own.

        Args:
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss.
        """
        import torch

        params, state = super().start(received, state, problem)
        return params, {**state, _STEP: torch.zeros((), dtype=torch.int64)}

    def gradient(self, params: Params, batch: Any, received: Message, state: ClientState, problem: Problem) -> Params:
        """Gives the batch's gradient at the rules after one inner step.

        Args:
            params: the rules now.
            batch: one item of `problem.batches`, for the outer gradient.
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss, for the inner batch.
        """
        rate = self.settings.inner_lr
        if rate:
            inner = next(iter(problem.batches(f"inner {int(state[_STEP])}", 1)))
            grads = super().gradient(params, inner, received, state, problem)
            params = {**params, **{name: params[name] - rate * grad for name, grad in grads.items()}}
        return super().gradient(params, batch, received, state, problem)

    def after_step(self, before: Params, after: Params, grads: Params, state: ClientState) -> ClientState:
        """Counts the step.

        Args:
            before: the rules before the step.
            after: the rules after it.
            grads: the gradient it took, before clipping.
            state: the client's state.
        """
        return {**state, _STEP: state[_STEP] + 1}

    def finish(
        self, params: Params, received: Message, state: ClientState, problem: Problem
    ) -> tuple[Message, ClientState]:
        """Ends as FedAvg does, and forgets the count.

        Args:
            params: the rules after the last local step.
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss.
        """
        message, state = super().finish(params, received, state, problem)
        return message, {name: tensor for name, tensor in state.items() if name != _STEP}
