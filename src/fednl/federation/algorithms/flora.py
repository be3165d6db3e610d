"""FLoRA: clients train fresh LoRA factors, and the server adds the mean of their products to a merged part."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field

from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.section import Section

if TYPE_CHECKING:
    from fednl.federation.local import Problem
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params


class FloraSettings(Section):
    """The `[flora]` section.

    Args:
        merged_rank: how many of the `lora.rank` components hold what earlier rounds made, frozen on the clients; the
            others are the fresh ones that a client trains and sends. From 1 to below `lora.rank`.
    """

    merged_rank: int = Field(default=8, ge=1)


class Flora(FedAvg):
    """Stacks the clients' factors, which is the exact mean of their products, onto what earlier rounds made.

    The first `merged-rank` components of every LoRA are the server's; a client trains only those after them, which
    begin every round as they were drawn, with B zero. Its reply holds these alone, of its own rank
    (`federation.lora-ranks`). The published method merges into the backbone, which stays frozen here: the merged part
    has a bounded rank, so the payload is the same in every round, and what the bound loses is `lora_error` in the
    round's row. It is nothing until the rounds' stacks outgrow `merged-rank`. Other rules than LoRA's are averaged as
    FedAvg does. `training.optimizer-state` must be `"reset"`, as the factors begin anew.

    Settings: `FloraSettings`.

    Source: Wang et al. 2024 (arXiv 2409.05976), section 4; the bounded merged part is ours.
    """

    Settings: ClassVar[type[BaseModel]] = FloraSettings
    traits: ClassVar[Traits] = Traits(
        one_client_is_local=False,
        identical_clients_unchanged=False,
        needs_lora=True,
        averages_products=True,
        sends_change=True,
        renews_factors=True,
    )

    def client_rank(self, rank: int) -> int:
        """Gives how many fresh components there are, less than 1 if the merged part leaves none.

        Args:
            rank: `lora.rank`.
        """
        return rank - int(self.settings.merged_rank)

    def offer(self, params: Params, rank: int | None) -> Params:
        """Gives the merged part and as many fresh components as the client trains.

        Args:
            params: the shared rules that go out.
            rank: the client's rank, of fresh components; None for all of them.
        """
        from fednl.federation.lora_ranks import cut

        return cut(params, None if rank is None else self.settings.merged_rank + rank)

    def returns(self, params: Params) -> Params:
        """Gives the fresh components, and rules that are no LoRA factor.

        Args:
            params: what the client got.
        """
        from fednl.federation.lora_ranks import cut

        return cut(params, None, skip=self.settings.merged_rank)

    def gradient(self, params: Params, batch: Any, received: Message, state: ClientState, problem: Problem) -> Params:
        """Gives the batch's gradient, zero for the merged part.

        Args:
            params: the rules now.
            batch: one item of `problem.batches`.
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss.
        """
        from fednl.federation.lora_ranks import padded

        grads = super().gradient(params, batch, received, state, problem)
        return padded(self.returns(grads), grads, before=True)

    def finish(
        self, params: Params, received: Message, state: ClientState, problem: Problem
    ) -> tuple[Message, ClientState]:
        """Sends the fresh components only.

        Args:
            params: the rules after the last local step.
            received: the server's message.
            state: the client's state.
            problem: the client's data and loss.
        """
        message, state = super().finish(params, received, state, problem)
        return replace(message, params=self.returns(message.params)), state

    def server_step(self, params: Params, combined: Message, server_state: ClientState) -> tuple[Params, ClientState]:
        """Adds the mean product to the merged part, cuts that to its rank, and lays the fresh components out anew.

        Args:
            params: the shared rules that were sent out.
            combined: the combined replies, with the mean product of each site in `extra`.
            server_state: not used.
        """
        import torch

        from fednl.federation.lora_products import joined, pairs, truncated

        new, state = super().server_step(params, combined, server_state)
        merged = joined(params, combined.extra)
        rank = self.settings.merged_rank
        for site in pairs(new):
            a, b = f"{site}.lora_A", f"{site}.lora_B"
            left, right = truncated(merged[b], merged[a], params[a][:rank])
            new[a] = torch.cat([right.to(params[a].dtype), params[a][rank:]])
            new[b] = torch.cat([left.to(params[b].dtype), torch.zeros_like(params[b][:, rank:])], dim=1)
        return new, state

    def measure(self, sent: Params, combined: Message, new: Params, products: Params) -> dict[str, float]:
        """Measures what the bound on the merged part lost; see `FedAvg.measure`."""
        from fednl.federation.lora_products import errors, joined

        return errors(joined(sent, products), new, sent)
