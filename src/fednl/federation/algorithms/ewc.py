"""EWC: a client holds fast, task after task, to what its finished tasks were sensitive to."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field

from fednl.federation.algorithms.consolidation import Consolidation
from fednl.federation.algorithms.fedavg import Traits
from fednl.section import Section

if TYPE_CHECKING:
    from fednl.federation.local import Problem
    from fednl.federation.params import ClientState, Params


class EwcSettings(Section):
    """The `[ewc]` section.

    Args:
        strength: the paper's lambda, at least 0; 0 is FedAvg. A rule is held once strength times its importance
            is as large as the curvature of the new task's loss. Importance is a squared gradient, usually a
            small number: sweep this by factors of ten, upwards.
        decay: how much of the importance of earlier tasks is kept at a task's end, from 0 to 1; 1 adds up.
        fisher_examples: how many of the client's examples the importance is measured on, at least 1.
    """

    strength: float = Field(default=100.0, ge=0, allow_inf_nan=False)
    decay: float = Field(default=1.0, ge=0, le=1)
    fisher_examples: int = Field(default=64, ge=1)


class Ewc(Consolidation):
    """Adds (strength / 2) sum_i F_i (w_i - w*_i)^2, with F the diagonal Fisher information of finished tasks.

    F is the mean over examples of the squared gradient of one example's loss, with the true answers as labels (the
    empirical Fisher information), at w*, the client's rules after the last local step of the task. Over tasks
    F = decay F_old + F_new, with one anchor, the latest. Nothing of it travels. Settings: `EwcSettings`.

    Source: Kirkpatrick et al. 2017 (arXiv 1612.00796), eq. 3; running sum: Schwarz et al. 2018 (arXiv 1805.06370),
    section 3. Ours: every client has its own F and anchor, and the defaults of strength and examples.
    """

    Settings: ClassVar[type[BaseModel]] = EwcSettings
    traits: ClassVar[Traits] = Traits(needs_tasks=True)

    @property
    def pull(self) -> float:
        """Half the strength."""
        return float(self.settings.strength) / 2

    def consolidated(self, params: Params, state: ClientState, problem: Problem) -> tuple[Params, Params]:
        """Measures F, summed in float64, and anchors the rules where they are.

        Args:
            params: the rules after the last local step of a task.
            state: the client's state, with `importance/NAME` of earlier tasks.
            problem: the task's data and loss.
        """
        from fednl.federation.params import value_and_gradient

        moved = self.trainable(params)
        total = {name: params[name].detach().double() * 0 for name in moved}
        number = min(self.settings.fisher_examples, problem.num_examples)
        for example in problem.batches("fisher", number, size=1):
            _, grads = value_and_gradient(partial(problem.loss, batch=example), params, moved)
            total = {name: total[name] + grads[name].double().square() for name in moved}
        fisher = {name: (total[name] / number).to(params[name].dtype) for name in moved}
        old = {name: state.get(f"importance/{name}", fisher[name] * 0) for name in moved}
        importance = {name: self.settings.decay * old[name] + fisher[name] for name in moved}
        return importance, {name: params[name] for name in moved}
