"""What EWC and FedSSI share: rules that mattered for earlier tasks are held where they were."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from fednl.federation.algorithms.fedavg import FedAvg

if TYPE_CHECKING:
    import torch

    from fednl.federation.local import Problem
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params


class Consolidation(FedAvg):
    """Adds a pull, weighted element by element, towards the rules of the last task; no algorithm itself.

    The penalty is `pull` sum_i importance_i (w_i - anchor_i)^2 over all rules that local steps move, shared or
    private. Importance and anchor are a client's own, in its state as `importance/NAME` and `anchor/NAME`; they
    never travel, and the server averages as FedAvg does. Before a client's first task has ended there is no
    penalty: with one task this is FedAvg to the bit. A task ends where the plan of a round says so
    (`fednl.federation.local.LocalPlan.ends`).
    """

    @property
    @abstractmethod
    def pull(self) -> float:
        """The factor before the sum, at least 0."""

    @abstractmethod
    def consolidated(self, params: Params, state: ClientState, problem: Problem) -> tuple[Params, Params]:
        """Gives the new importance of each rule that local steps move, and its new anchor where that is known already.

        Args:
            params: the rules after the last local step of a task.
            state: the client's state, with what earlier tasks left.
            problem: the task's data and loss.
        """

    def penalty(self, params: Params, received: Message, state: ClientState) -> torch.Tensor | float:
        """Gives the pull's value; 0 before the first task's end.

        Args:
            params: the rules now, as autograd leaves.
            received: the server's message.
            state: the client's state.
        """
        held = [name for name in params if f"anchor/{name}" in state] if self.pull else []
        return self.pull * sum(
            (state[f"importance/{name}"] * (params[name] - state[f"anchor/{name}"]).square()).sum() for name in held
        )

    def boundary(self, task: str, params: Params, state: ClientState, problem: Problem) -> ClientState:
        """Renews importance and anchor from the task that ends, while its data are still there.

        Args:
            task: the name of the task that ends.
            params: the rules at its end.
            state: the client's state.
            problem: the task's data and loss.
        """
        importance, anchor = self.consolidated(params, state, problem)
        kept = {name: tensor for name, tensor in state.items() if not name.startswith("anchor/")}
        kept |= {f"importance/{name}": tensor for name, tensor in importance.items()}
        return {**kept, **{f"anchor/{name}": tensor.detach().clone() for name, tensor in anchor.items()}}
