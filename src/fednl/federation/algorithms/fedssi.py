"""FedSSI: what mattered for earlier tasks is measured on a surrogate model of the client's own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import BaseModel, Field, model_validator

from fednl.federation.algorithms.consolidation import Consolidation
from fednl.federation.algorithms.fedavg import Traits
from fednl.section import Section

if TYPE_CHECKING:
    from fednl.federation.local import Problem
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params


class FedSsiSettings(Section):
    """The `[fedssi]` section; only xi has a published value.

    Args:
        strength: the paper's alpha, at least 0; 0 is FedAvg. A rule is held once twice strength times its
            importance is as large as the curvature of the new task's loss; short or small surrogate steps give
            little importance: sweep this by factors of ten, upwards.
        locality: the paper's lambda, above 0 and at most 1: at 1 the surrogate follows the client's data alone,
            towards 0 it is glued to the server's rules. Should be higher the more clients differ.
        surrogate_steps: gradient steps of the surrogate at a task's end, at least 1.
        surrogate_lr: their size, above 0; times (1 - locality) / (2 locality), the pull towards the round's rules, it
            must be below 2, and should be well below, as the surrogate diverges otherwise.
        xi: added to the squared distance that importance is divided by, above 0.
    """

    strength: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    locality: float = Field(default=0.5, gt=0, le=1)
    surrogate_steps: int = Field(default=8, ge=1)
    surrogate_lr: float = Field(default=1e-2, gt=0, allow_inf_nan=False)
    xi: float = Field(default=0.1, gt=0, allow_inf_nan=False)

    @property
    def surrogate_pull(self) -> float:
        """The paper's q: how strongly the surrogate is pulled towards the rules that the round began with."""
        return (1 - self.locality) / (2 * self.locality)

    @model_validator(mode="after")
    def _the_surrogate_converges(self) -> Self:
        pull = self.surrogate_pull
        if self.surrogate_lr * pull >= 2:
            raise ValueError(
                f"surrogate-lr = {self.surrogate_lr:g} times (1 - locality) / (2 locality) = {pull:.4g} is 2 or more, "
                f"so that the surrogate would diverge: set surrogate-lr below {2 / pull:.3g}, or raise "
                f"locality = {self.locality:g}"
            )
        return self


class FedSsi(Consolidation):
    """Adds strength sum_i O_i (w_i - w'_i)^2, with O the path integral of a surrogate model over finished tasks.

    At a task's end the client trains a surrogate v on that task's data, from the rules u that the round began
    with (the server's, and the client's private ones): v = v - surrogate_lr (g + q (v - u)), with
    q = (1 - locality) / (2 locality) and g the gradient of the data's loss. Each step adds -g_i (change of v_i) to
    o_i, and the task adds max(0, o_i / ((v_i - u_i)^2 + xi)) to O_i. The surrogate is then dropped; nothing of it
    travels. The anchor w' is what the client's next round begins with: what all clients together made of the task, if
    that is the very next round. A client that is asked later, as where a part of the clients is asked in a round, is
    anchored at rules into which the rounds of the next task between have gone already. Settings: `FedSsiSettings`.

    Source: FedSSI (arXiv 2412.13779), eqs. 2, 5 and 6; synaptic intelligence: Zenke et al. 2017 (arXiv 1703.04200),
    eqs. 3 to 5. Ours, where these leave it open: g without the pull, no O below 0, plain steps, u as of the last
    round of the task, and all defaults but xi.
    """

    Settings: ClassVar[type[BaseModel]] = FedSsiSettings
    traits: ClassVar[Traits] = Traits(needs_tasks=True)

    @property
    def pull(self) -> float:
        """The strength itself."""
        return float(self.settings.strength)

    def start(self, received: Message, state: ClientState, problem: Problem) -> tuple[Params, ClientState]:
        """Starts as FedAvg does, remembers for this round what from, as `start/NAME`; it is the anchor after a task.

        Args:
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss.
        """
        params, state = super().start(received, state, problem)
        moved = self.trainable(params)
        fresh = [name for name in moved if f"importance/{name}" in state and f"anchor/{name}" not in state]
        anchors = {f"anchor/{name}": params[name].detach().clone() for name in fresh}
        return params, {**state, **anchors, **{f"start/{name}": params[name] for name in moved}}

    def consolidated(self, params: Params, state: ClientState, problem: Problem) -> tuple[Params, Params]:
        """Trains the surrogate, and turns its path into importance.

        Args:
            params: the rules after the last local step of a task.
            state: the client's state, with `start/NAME`, and `importance/NAME` of earlier tasks.
            problem: the task's data and loss.
        """
        from fednl.federation.params import value_and_gradient

        settings, moved = self.settings, self.trainable(params)
        q = settings.surrogate_pull
        start = {name: state[f"start/{name}"] for name in moved}
        surrogate, path = dict(start), {name: start[name] * 0 for name in moved}
        for batch in problem.batches("surrogate", settings.surrogate_steps):
            at = {**params, **surrogate}
            _, grads = value_and_gradient(partial(problem.loss, batch=batch), at, moved)
            for name, grad in grads.items():
                change = -settings.surrogate_lr * (grad + q * (surrogate[name] - start[name]))
                surrogate[name] = surrogate[name] + change
                path[name] = path[name] - grad * change
        importance = {}
        for name in moved:
            distance = (surrogate[name] - start[name]).square()
            old = state.get(f"importance/{name}", path[name] * 0)
            # Only rounding is below zero: with n = surrogate_lr the path is q/2 (v - u)^2 + (1/n - q/2) times the sum
            # of all squared changes, whatever the gradients, and the settings keep q n below 2.
            importance[name] = old + (path[name] / (distance + settings.xi)).clamp(min=0)
        return importance, {}

    def finish(
        self, params: Params, received: Message, state: ClientState, problem: Problem
    ) -> tuple[Message, ClientState]:
        """Ends as FedAvg does, and forgets what the round began with.

        Args:
            params: the rules after the last local step.
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss.
        """
        message, state = super().finish(params, received, state, problem)
        return message, {name: tensor for name, tensor in state.items() if not name.startswith("start/")}
