"""IFed-ICL: context vectors are collected and averaged once, then only their injection coefficients travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from pydantic import BaseModel, Field

from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.section import Section

if TYPE_CHECKING:
    import torch

    from fednl.federation.local import Problem
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params

    Like: TypeAlias = Callable[[torch.Tensor], torch.Tensor | None]

VECTORS, COEFFICIENTS = "context.vectors", "context.coefficients"
"""Any backbone's context vectors and the coefficients that inject them, as the adapter names them."""


class IfedIclSettings(Section):
    """The `[ifed-icl]` section.

    Args:
        min_examples: a client with fewer training examples sends no context vector, as the mean of very few shows
            their activations; at least 1. It takes part in the rounds after that.

    Source: ours; the paper states no such limit.
    """

    min_examples: int = Field(default=2, ge=1)


class IfedIcl(FedAvg):
    """Stage 1 is the first round: every client sends its mean context vector, v_k, and takes no step. After it the
    server sends v = mean of v_k to each client once, and coefficients travel: clients train them through v.

    The mean of vectors and of coefficients weights clients as `[combine] weights` says: `"uniform"` is the published
    one, `"examples"` makes v the mean over all examples. A round in which no vector came is taken again. Settings:
    `IfedIclSettings`.

    Attributes:
        like: where set, is asked once, after the first round of coefficients, with their mean: what it gives takes
            their place (coefficients of like tasks). Vectors stay this task's own, which every client has by then.

    Source: IFed-ICL, equations 1 to 7; I2CL (arXiv 2405.14660) for what a client computes. The minimum number of
    examples is ours.
    """

    Settings: ClassVar[type[BaseModel]] = IfedIclSettings
    traits: ClassVar[Traits] = Traits(sends_extra=True, needs_context=True)
    alone: ClassVar[str] = "i2cl"
    pooled: ClassVar[str] = "ifed-icl"
    like: Like | None = None

    def given(self, names: Iterable[str]) -> list[str]:
        """Lists the context vectors."""
        return [name for name in names if name == VECTORS]

    def made(self, server_state: ClientState) -> bool:
        """Says whether stage 1 is over."""
        return "made" in server_state

    def opening(self, params: Params) -> ClientState:
        """Notes that stage 1 is over, and no like task needed, where the run starts with vectors (a stored task's)."""
        import torch

        known = VECTORS in params and bool(params[VECTORS].any())
        return dict.fromkeys(("made", "asked"), torch.ones((), dtype=torch.int64)) if known else {}

    def trainable(self, names: Iterable[str]) -> list[str]:
        """Lists all but the context vectors."""
        return sorted(name for name in names if name != VECTORS)

    def steps(self, state: ClientState, planned: int) -> int:
        """Gives 0 in stage 1."""
        return 0 if f"own/{VECTORS}" in state else planned

    def start(self, received: Message, state: ClientState, problem: Problem) -> tuple[Params, ClientState]:
        """Gives coefficients and the global vectors; where there are none yet, reads the client's own."""
        params, state = super().start(received, state, problem)
        if VECTORS in params:
            return params, state
        return params, {**state, **{f"own/{name}": tensor for name, tensor in problem.collect().items()}}

    def finish(
        self, params: Params, received: Message, state: ClientState, problem: Problem
    ) -> tuple[Message, ClientState]:
        """Sends the client's own vectors in stage 1, if it has enough examples, and coefficients after it."""
        from fednl.federation.message import Message
        from fednl.federation.params import copy, kept

        own = kept(state, "own")
        if not own:
            return super().finish(params, received, state, problem)
        state = {name: tensor for name, tensor in state.items() if not name.startswith("own/")}
        if problem.num_examples < self.settings.min_examples:
            return Message(copy(received.params), status="withheld"), state
        return Message(copy(received.params), copy(own), num_examples=problem.num_examples), state

    def server_step(self, params: Params, combined: Message, server_state: ClientState) -> tuple[Params, ClientState]:
        """Takes the mean of vectors as the global ones in stage 1, and the mean of coefficients after it.

        After the first round of coefficients those of like tasks take their place, where there are any.
        """
        import torch

        new, state = super().server_step(params, combined, server_state)
        yes = torch.ones((), dtype=torch.int64)
        if VECTORS in combined.extra:
            return {**new, VECTORS: combined.extra[VECTORS]}, {**state, "made": yes}
        if self.like is None or "asked" in state:
            return new, state
        start = self.like(new[COEFFICIENTS])
        return new if start is None else {**new, COEFFICIENTS: start.to(new[COEFFICIENTS])}, {**state, "asked": yes}
