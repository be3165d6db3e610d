"""I2CL: every client trains coefficients for its own context vectors, alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from fednl.federation.algorithms.fedavg import Traits
from fednl.federation.algorithms.ifed_icl import VECTORS, IfedIcl

if TYPE_CHECKING:
    from fednl.federation.local import Problem
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params


class I2cl(IfedIcl):
    """Shares nothing: context vectors from the client's own examples in the first round, then the same steps as
    IFed-ICL takes, and no number leaves a client.

    Like IFed-ICL it takes no step in the first round, so that both have taken as many after every round.

    Source: I2CL (arXiv 2405.14660), linear injection; AdamW without weight decay and clipping as for every method here.
    """

    traits: ClassVar[Traits] = Traits(shares=False, needs_context=True)

    def shared(self, names: Iterable[str]) -> list[str]:
        """Lists the names that travel: none."""
        return []

    def given(self, names: Iterable[str]) -> list[str]:
        """Lists what the server gives: nothing."""
        return []

    def start(self, received: Message, state: ClientState, problem: Problem) -> tuple[Params, ClientState]:
        """Gives the client's own coefficients and vectors; these are read in the first round that it is in."""
        params, state = super().start(received, state, problem)
        if VECTORS not in params or bool(params[VECTORS].any()):
            return params, state
        own = problem.collect()
        return {**params, **own}, {**state, **{f"own/{name}": tensor for name, tensor in own.items()}}

    def finish(
        self, params: Params, received: Message, state: ClientState, problem: Problem
    ) -> tuple[Message, ClientState]:
        """Keeps everything to itself."""
        state = {name: tensor for name, tensor in state.items() if not name.startswith("own/")}
        return super().finish(params, received, state, problem)
