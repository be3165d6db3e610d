"""Combining replies as they come, without keeping them all, and without their order changing a bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from fednl.federation.message import Message
from fednl.federation.params import Params


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
