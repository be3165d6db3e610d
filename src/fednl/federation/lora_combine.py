"""What LoRA asks of combining: replies of unlike ranks, and the mean of the clients' products beside the rule's own."""

from __future__ import annotations

from dataclasses import replace

import torch

from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.exchange import CombineSettings
from fednl.federation.lora_products import ProductMean
from fednl.federation.lora_ranks import padded, rank_axis
from fednl.federation.message import Message
from fednl.federation.params import Params
from fednl.federation.robust import make_combiner


class LoraCombiner:
    """Combines by the rule that the settings name, whatever the ranks of the replies' LoRA factors.

    A client without a component has zero there in B, and no say in A: the product then has the weight that the mean of
    products gives it. Zeros in both, as HetLoRA pads, would give that weight squared. With one rank for all, it is the
    rule of the settings to the bit.

    Args:
        algorithm: whose replies they are.
        settings: the `[combine]` section.
        shared: the shared rules that were sent out, of the server's rank.
        asked: how many clients a round of this run asks.

    Source: ours; padding as HetLoRA (arXiv 2401.06432), section 3.
    """

    def __init__(self, algorithm: FedAvg, settings: CombineSettings, shared: Params, asked: int) -> None:
        self._like = algorithm.returns(shared)
        self._settings = settings
        self._hands_products_on = algorithm.traits.averages_products
        self._inner = make_combiner(settings, self._like, asked)
        self._products = ProductMean()
        self._held = {n: torch.zeros(len(t), dtype=torch.float64) for n, t in self._like.items() if rank_axis(n) == 0}
        self._weight = 0.0

    def add(self, message: Message) -> None:
        """Takes one reply in."""
        weight = float(self._settings.counted(message.num_examples))
        self._weight += weight
        for name, held in self._held.items():
            held[: len(message.params[name])] += weight
        if self._settings.is_plain:  # what a cap or a robust rule takes away is nothing that averaging factors misses
            self._products.add(message.params, weight)
        self._inner.add(replace(message, params=padded(message.params, self._like)))

    def fault(self) -> str:
        """Says why these replies make no update; empty if they do."""
        return self._inner.fault()

    def products(self) -> Params:
        """Gives the mean of the clients' products, see `ProductMean.result`; empty unless that is the rule."""
        return self._products.result()

    def result(self) -> Message:
        """Gives the combined message; a component of A that no client has is as it was sent."""
        combined = self._inner.result()
        params = dict(combined.params)
        for name, held in self._held.items():
            if bool((held != self._weight).any()):
                mean, kept = params[name], self._like[name]
                share = (self._weight / held.clamp(min=1.0)).to(mean.device)[:, None]
                params[name] = torch.where(held.to(mean.device)[:, None] > 0, mean * share, kept).to(mean.dtype)
        extra = {**combined.extra, **(self.products() if self._hands_products_on else {})}
        return replace(combined, params=params, extra=extra)

    def facts(self) -> dict[str, float]:
        """Gives what a round's row should say besides, by metric."""
        return self._inner.facts()
