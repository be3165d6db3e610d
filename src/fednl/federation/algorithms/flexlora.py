"""FlexLoRA: the clients' LoRA products are averaged exactly, then cut to the server's rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fednl.federation.algorithms.fedavg import FedAvg, Traits

if TYPE_CHECKING:
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params


class FlexLora(FedAvg):
    """Averages B_k A_k, where FedAvg averages B_k and A_k, and sends the nearest factors of the server's rank.

    What the cut loses is `lora_error` in the round's row; it is nothing where the clients' ranks together do not exceed
    the server's. A client of a lower rank (`federation.lora-ranks`) gets the nearest factors of its own, and a
    component counts for those who have it. Other rules than LoRA's are averaged as FedAvg does. The factors are others
    every round, so `training.optimizer-state` must be `"reset"`; the payload is FedAvg's.

    Source: Bai et al. 2024 (arXiv 2402.11505), section 3, for one rank; with several the paper takes a component
    that a client lacks as zero. How the product is split into factors is ours, see
    `fednl.federation.lora_products.truncated`.
    """

    traits: ClassVar[Traits] = Traits(
        one_client_is_local=False,
        identical_clients_unchanged=False,
        needs_lora=True,
        averages_products=True,
        renews_factors=True,
    )

    def server_step(self, params: Params, combined: Message, server_state: ClientState) -> tuple[Params, ClientState]:
        """Gives the best factors of the mean product, and the mean of all other rules.

        Args:
            params: the shared rules that were sent out.
            combined: the combined replies, with the mean product of each site in `extra`.
            server_state: not used.
        """
        from fednl.federation.lora_products import pairs, truncated

        new, state = super().server_step(params, combined, server_state)
        for site in pairs(new):
            a, b = f"{site}.lora_A", f"{site}.lora_B"
            left, right = truncated(combined.extra[b], combined.extra[a], params[a])
            new |= {a: right.to(new[a].dtype), b: left.to(new[b].dtype)}
        return new, state

    def measure(self, sent: Params, combined: Message, new: Params, products: Params) -> dict[str, float]:
        """Measures what the cut to the server's rank lost; see `FedAvg.measure`."""
        from fednl.federation.lora_products import errors

        return errors(products, new, sent)
