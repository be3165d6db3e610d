"""FedAvg: train locally, send the shared rules, average them by examples. The base of all algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from fednl.federation.traits import Traits as Traits
from fednl.section import Section

if TYPE_CHECKING:  # a settings file is checked without torch
    import torch

    from fednl.federation.local import Problem
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params


class FedAvgSettings(Section):
    """FedAvg has no settings of its own."""


class FedAvg:
    """Federated averaging. Another algorithm is a subclass with the hooks it needs; hooks return new tensors.

    Args:
        settings: an instance of this class's `Settings`; None for its defaults.
        shared: what travels: a preset, a group, a pattern of names, or a list of these. What does not travel
            stays private to each client, in its state under `private/NAME`, and survives rounds.
        weigh: gives what a client with so many examples counts in the mean; None for as much as it has examples.

    Source: McMahan et al. 2017 (arXiv 1602.05629), Algorithm 1; private parts: FedPer (arXiv 1912.00818).
    """

    Settings: ClassVar[type[BaseModel]] = FedAvgSettings
    traits: ClassVar[Traits] = Traits()
    alone: ClassVar[str] = "local-only"
    """The algorithm that trains the same thing without sharing, for the local-only arm of a comparison."""
    pooled: ClassVar[str] = "fedavg"
    """The algorithm with which one learner trains the same thing on everybody's examples."""

    def __init__(
        self, settings: Any = None, shared: str | Sequence[str] = "theta", weigh: Callable[[int], int] | None = None
    ) -> None:
        self.settings: Any = self.Settings() if settings is None else settings
        if type(self.settings) is not self.Settings:
            raise TypeError(f"{type(self).__name__} takes an instance of {self.Settings.__name__}")
        self.lets_out = shared
        self.weigh = weigh or int

    @property
    def consolidates(self) -> bool:
        """Whether the end of a task in a stream of tasks means anything to it."""
        return type(self).boundary is not FedAvg.boundary

    def shared(self, names: Iterable[str]) -> list[str]:
        """Lists the names that travel every round, sorted; the allow-list in both directions.

        Args:
            names: canonical names of all that is trained.
        """
        from fednl.federation.groups import select

        names = list(names)
        given = set(self.given(names))
        return select((name for name in names if name not in given), self.lets_out)

    def extra(self, params: Params) -> Params:
        """Names what else messages may carry, with a tensor like each; a reply has all but `apart`'s; here nothing.

        Args:
            params: the shared rules.
        """
        return {}

    def apart(self, names: Iterable[str]) -> list[str]:
        """Lists what the server gets of each client by itself, as `combined.apart`; a reply has all or none; here none.

        Args:
            names: of what a message carries beside the rules.
        """
        return []

    def given(self, names: Iterable[str]) -> list[str]:
        """Lists the rules that are neither trained nor private: the server makes them and gives each client them once.

        Until the server has `made` them, replies with examples must carry what it makes them of, beside the rules and
        under the same names. Then each client is sent them, until it has answered one message that carried them, and
        keeps them in its state as `given/NAME`.

        Args:
            names: canonical names; of what a message carries beside the rules, or of all rules.
        """
        return []

    def made(self, server_state: ClientState) -> bool:
        """Says whether the server has made what it gives; `server_step` does so and notes it in its state.

        Args:
            server_state: the server's own tensors; empty at first.
        """
        return True

    def broadcast(self, params: Params, server_state: ClientState) -> Params:
        """Gives what else the server's message carries, under names of `extra`, as `received.extra`; here nothing.

        Args:
            params: the shared rules that go out.
            server_state: the server's own tensors; empty at first.
        """
        return {}

    def to_client(self, beside: Params, client: str, server_state: ClientState, counted: int) -> Params:
        """Gives what one client is sent of `broadcast` and `once`, and what it alone is told; here the same for all.

        Args:
            beside: what `broadcast` gave, and to a client that has yet to get it, what `once` gave. Not modified.
            client: its name.
            server_state: the server's own tensors.
            counted: the last round whose update holds a reply of this client; 0 for none.
        """
        return beside

    def once(self, server_state: ClientState) -> Params:
        """Gives what a client is sent until it has answered, and again when `apart` has brought new; here nothing.

        Called at most once a round, where a client lacks it; `to_client` makes of it what is sent. `server_state` is
        the server's own tensors.
        """
        return {}

    def client_rank(self, rank: int) -> int:
        """Gives how many components of a LoRA a client trains at most; here all of them.

        Args:
            rank: `lora.rank`.
        """
        return rank

    def offer(self, params: Params, rank: int | None) -> Params:
        """Gives rules as a client with a LoRA of another rank has them; here its leading components.

        Args:
            params: the shared rules that go out, or others.
            rank: the client's rank; None for that of the server.
        """
        from fednl.federation.lora_ranks import cut

        return cut(params, rank)

    def returns(self, params: Params) -> Params:
        """Gives a tensor of the name, shape and dtype of each that a reply carries as rules; here what was sent.

        Args:
            params: what the client got.
        """
        return dict(params)

    def trainable(self, names: Iterable[str]) -> list[str]:
        """Lists the names that local steps move, sorted; here all of them.

        Args:
            names: canonical names of all that is trained.
        """
        return sorted(names)

    def opening(self, params: Params) -> ClientState:
        """Gives the server's tensors before the first round; here none.

        Args:
            params: the start values of all rules.
        """
        return {}

    def steps(self, state: ClientState, planned: int) -> int:
        """Gives how many local steps a client takes in this round; here those planned.

        Args:
            state: the client's state, as `start` gave it.
            planned: `[training] local-steps`.
        """
        return planned

    def start(self, received: Message, state: ClientState, problem: Problem) -> tuple[Params, ClientState]:
        """Gives the rules a client's local steps begin with: what came, what it was given, what it kept to itself.

        Args:
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss.
        """
        from fednl.federation.params import kept, personal

        return personal({**received.params, **kept(state, "given")}, state), state

    def gradient(self, params: Params, batch: Any, received: Message, state: ClientState, problem: Problem) -> Params:
        """Gives the gradient of the batch's loss plus the penalty, for the names that local steps move.

        Args:
            params: the rules now.
            batch: one item of `problem.batches`.
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss.
        """
        from fednl.federation.params import value_and_gradient

        def loss(leaves: Params) -> torch.Tensor:
            return problem.loss(leaves, batch) + self.penalty(leaves, received, state)

        return value_and_gradient(loss, params, self.trainable(params))[1]

    def penalty(self, params: Params, received: Message, state: ClientState) -> torch.Tensor | float:
        """Gives what is added to the loss, differentiable in `params`; here nothing.

        Args:
            params: the rules now, as autograd leaves.
            received: the server's message.
            state: the client's state.
        """
        return 0.0

    def after_step(self, before: Params, after: Params, grads: Params, state: ClientState) -> ClientState:
        """Lets an algorithm note what a local step did; here nothing.

        Args:
            before: the rules before the step.
            after: the rules after it.
            grads: the gradient it took, before clipping.
            state: the client's state.
        """
        return state

    def boundary(self, task: str, params: Params, state: ClientState, problem: Problem) -> ClientState:
        """Lets an algorithm consolidate at the end of a task in a stream of tasks; here nothing.

        Args:
            task: the name of the task that ends.
            params: the rules at its end.
            state: the client's state.
            problem: the task's data and loss, while they are still there.
        """
        return state

    def finish(
        self, params: Params, received: Message, state: ClientState, problem: Problem
    ) -> tuple[Message, ClientState]:
        """Splits what local steps made into a message of shared rules and a state that keeps the others.

        Args:
            params: the rules after the last local step.
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss.
        """
        from fednl.federation.message import Message
        from fednl.federation.params import copy

        travels = set(self.shared(params))
        others = set(params) - travels - set(self.given(params))
        sent = copy({name: tensor for name, tensor in params.items() if name in travels})
        private = copy({f"private/{name}": params[name] for name in params if name in others})
        return Message(sent, num_examples=problem.num_examples), {**state, **private}

    def answers(self, params: Params, state: ClientState) -> Params:
        """Gives the rules that a client answers with, a task's own as `TASK/NAME`; here shared and private ones.

        Args:
            params: all rules, as the server has them.
            state: the client's state.
        """
        from fednl.federation.params import personal

        return personal(params, state)

    def server_step(self, params: Params, combined: Message, server_state: ClientState) -> tuple[Params, ClientState]:
        """Turns the combined reply into new shared rules and a new server state; here the mean itself.

        Args:
            params: the shared rules that were sent out.
            combined: the combined replies: mean params, and the sum of examples.
            server_state: the server's own tensors from the round before; empty at first.
        """
        return dict(combined.params), server_state

    def measure(self, sent: Params, combined: Message, new: Params, products: Params) -> dict[str, float]:
        """Measures a server step for the round's row; here what averaging LoRA's factors misses (`lora_error...`).

        Args:
            sent: the shared rules that were sent out.
            combined: the combined replies.
            new: what `server_step` made of them.
            products: the mean of the clients' products B A, as factors under their own names, any rank; empty where
                no pair of factors travels.
        """
        from fednl.federation.lora_products import errors

        return errors(products, combined.params, sent)
