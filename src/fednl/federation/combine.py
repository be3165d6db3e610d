"""Combining replies as they come, without keeping them all, and without their order changing a bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import torch

from fednl.federation.exchange import CombineSettings
from fednl.federation.message import Message
from fednl.federation.params import Params, add_scaled, norm, shortened, subtract

NO_EXAMPLES = "no client that was asked has examples"
WITHHELD = "no client that was asked has enough examples to share what it learns"


class Combiner(Protocol):
    """Makes one message of a round's accepted replies, which come in the order of names."""

    def add(self, message: Message) -> None:
        """Takes one reply in; one without examples changes nothing."""
        ...

    def fault(self) -> str:
        """Says why these replies make no update; empty if they do."""
        ...

    def result(self) -> Message:
        """Gives the combined message; its `num_examples` is the weight of all."""
        ...

    def facts(self) -> dict[str, float]:
        """Gives what a round's row should say besides, by metric."""
        ...


class WeightedMean:
    """The mean of params weighted by examples, item by item: m += (w_k / sum w so far) (p_k - m), in float64.

    In this form one item, or items that are all equal, come back to the bit in every dtype. The last bits of
    float64 still depend on the order of `add`; `InOrder` fixes that order.

    Source: FedAvg (arXiv 1602.05629), Algorithm 1, server line; updating form after West 1979.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._mean: Params = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, params: Params, weight: float) -> None:
        """Takes one item in; weight 0 changes nothing.

        Args:
            params: the same names and shapes each time; not modified, not kept.
            weight: at least 0, usually the client's examples.
        """
        if weight <= 0:
            return
        self.weight += weight
        if not self._dtypes:
            self._mean = {name: value.detach().to(torch.float64, copy=True) for name, value in params.items()}
            self._dtypes = {name: value.dtype for name, value in params.items()}
            return
        for name, mean in self._mean.items():
            mean += (params[name].detach().double() - mean) * (weight / self.weight)

    def result(self) -> Params:
        """Gives the mean in the dtypes of the first item; new tensors; empty if nothing with weight came."""
        return {name: mean.to(self._dtypes[name], copy=True) for name, mean in self._mean.items()}


class Mean:
    """FedAvg's mean of replies, one in memory at a time; weights and lengths are bounded as the settings say.

    Args:
        settings: the `[combine]` section.
        start: the shared rules that were sent out, from which a client's change is measured.
    """

    def __init__(self, settings: CombineSettings, start: Params) -> None:
        self._settings, self._start = settings, start
        self._params, self._extra = WeightedMean(), WeightedMean()
        self._capped = 0

    def add(self, message: Message) -> None:
        """Takes one reply in."""
        weight = self._settings.counted(message.num_examples)
        if weight:
            bounded = within(message, self._start, self._settings.norm_cap)
            self._capped += bounded is not message
            self._params.add(bounded.params, weight)
            self._extra.add(bounded.extra, weight)

    def fault(self) -> str:
        """Says that nobody had examples, if so."""
        return "" if self._params.weight else NO_EXAMPLES

    def result(self) -> Message:
        """Gives the means, and the sum of weights."""
        return Message(self._params.result(), self._extra.result(), num_examples=int(self._params.weight))

    def facts(self) -> dict[str, float]:
        """Gives how many clients were shortened to the cap, where there is one."""
        return {"capped_clients": float(self._capped)} if self._settings.norm_cap else {}


def within(message: Message, start: Params, cap: float) -> Message:
    """Gives a reply whose change from `start` is at most `cap` long; the reply itself if it already is.

    Args:
        message: an accepted reply. Not modified.
        start: the shared rules that were sent out.
        cap: largest L2 norm over all rules together; 0 for no limit.
    """
    if not cap:
        return message
    change = subtract(message.params, start)
    if norm(change) <= cap:
        return message
    return replace(message, params=add_scaled(start, shortened(change, cap), 1.0))


class InOrder:
    """Releases replies in the sorted order of client names, whatever the order they come in.

    A reply waits only for clients before it in that order that are still out. A transport that asks in the
    sorted order therefore has about as many replies waiting as it has clients at work.

    Args:
        clients: who was asked.
    """

    def __init__(self, clients: Iterable[str]) -> None:
        self._due = sorted(clients)
        self._came: dict[str, Message | None] = {}

    def put(self, client: str, message: Message | None) -> Iterator[Message]:
        """Takes a client's reply, and gives those that are now due.

        Args:
            client: one of those asked, once.
            message: its reply; None if there will be none from this client in this round.
        """
        self._came[client] = message
        while self._due and self._due[0] in self._came:
            due = self._came.pop(self._due.pop(0))
            if due is not None:
                yield due

    def rest(self) -> Iterator[Message]:
        """Gives what is left, in order, once nobody is waited for."""
        for client in self._due:
            due = self._came.pop(client, None)
            if due is not None:
                yield due
        self._due = []
