"""What LoRA asks of combining: replies of unlike ranks, and the mean of the clients' products beside the rule's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.combine import WeightedMean
from fednl.federation.exchange import CombineSettings
from fednl.federation.lora_products import ProductMean, joined, pairs
from fednl.federation.lora_ranks import cut, rank_axis
from fednl.federation.message import Message
from fednl.federation.params import Params
from fednl.federation.robust import make_combiner


class LoraCombiner:
    """Combines by the rule that the settings name, whatever the ranks of the replies' LoRA factors.

    A component counts for the clients who have it, with their weights among these, in A, in B and in the mean product;
    one that no reply has stays as it was sent out. Clients that return what they were sent leave everything as it is,
    and who does not answer takes nothing away. With one rank for all, it is the rule of the settings to the bit.

    Args:
        algorithm: whose replies they are.
        settings: the `[combine]` section; unlike ranks go with its plain mean only.
        shared: the shared rules that were sent out, of the server's rank.
        asked: how many clients a round of this run asks.
        ranks: those of clients with a lower one than the server's, as `[federation] lora-ranks` has them.

    Source: ours. HetLoRA (arXiv 2401.06432), section 3, pads both factors with zeros instead, which draws every
    component that some clients lack towards zero.
    """

    def __init__(
        self,
        algorithm: FedAvg,
        settings: CombineSettings,
        shared: Params,
        asked: int,
        ranks: Iterable[int] = (),
    ) -> None:
        self._like = algorithm.returns(shared)
        self._settings, self._traits = settings, algorithm.traits
        # What a cap or a robust rule takes away is nothing that averaging factors misses, and is measured whole.
        factors = [name for name in self._like if settings.is_plain and rank_axis(name) is not None]
        self._factors, rest = _parted(self._like, factors)
        self._bands = _bands(self._factors, ranks)
        self._inner = make_combiner(settings, rest, asked)
        self._weight = 0.0

    def add(self, message: Message) -> None:
        """Takes one reply in."""
        weight = float(self._settings.counted(message.num_examples))
        self._weight += weight
        factors, rest = _parted(message.params, self._factors)
        for band in self._bands:
            band.add(factors, weight)
        self._inner.add(replace(message, params=rest))

    def fault(self) -> str:
        """Says why these replies make no update; empty if they do."""
        return self._inner.fault()

    def products(self) -> Params:
        """Gives the mean of the clients' products as factors, see `ProductMean.result`; empty unless that is the rule.

        Of an algorithm whose factors are a round's change itself, a component that a client lacks is zero in the mean.
        """
        whole = self._weight if self._traits.sends_change else None
        mean: Params = {}
        for band in self._bands:
            part = band.product(whole)
            mean = joined(mean, part) if mean and part else mean or part
        return mean

    def result(self) -> Message:
        """Gives the combined message."""
        combined, bands = self._inner.result(), [band.mean() for band in self._bands]
        factors = {name: torch.cat([one[name] for one in bands], rank_axis(name) or 0) for name in self._factors}
        mean = {**combined.params, **factors}
        extra = {**combined.extra, **(self.products() if self._traits.averages_products else {})}
        return replace(combined, params={name: mean[name] for name in self._like}, extra=extra)

    def facts(self) -> dict[str, float]:
        """Gives what a round's row should say besides, by metric."""
        return self._inner.facts()


class _Band:
    """Components that a client has all of or none of: their means over those who have them."""

    def __init__(self, factors: Params, first: int, end: int) -> None:
        self._first, self._end = first, end
        self._sent = cut(factors, end, skip=first)
        self._mean, self._product = WeightedMean(), ProductMean()

    def add(self, factors: Params, weight: float) -> None:
        own = cut(factors, self._end, skip=self._first)
        if all(tensor.numel() for tensor in own.values()):
            self._mean.add(own, weight)
            self._product.add(own, weight)

    def mean(self) -> Params:
        return self._mean.result() or self._sent

    def product(self, whole: float | None) -> Params:
        if self._mean.weight:
            return self._product.result(whole)
        return {} if whole else {name: self._sent[name].double() for name in _factors_of(self._sent)}


def _bands(factors: Params, ranks: Iterable[int]) -> list[_Band]:
    """The components in order, parted where some client's end."""
    most = max((tensor.shape[rank_axis(name) or 0] for name, tensor in factors.items()), default=0)
    ends = [*sorted({rank for rank in ranks if rank < most}), most] if most else []
    return [_Band(factors, first, end) for first, end in zip([0, *ends], ends, strict=False)]


def _factors_of(params: Params) -> list[str]:
    return [f"{site}.lora_{factor}" for site in pairs(params) for factor in "AB"]


def _parted(params: Params, names: Iterable[str]) -> tuple[Params, Params]:
    """The tensors of these names, and all others."""
    names = set(names)
    return {n: t for n, t in params.items() if n in names}, {n: t for n, t in params.items() if n not in names}
