"""What an algorithm wants of single clients: tensors beside the rules that are handed on by client, not averaged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.lora_combine import LoraCombiner
from fednl.federation.message import Message
from fednl.federation.params import Params


@dataclass(frozen=True)
class Combined(Message):
    """A round's combined reply, with what single clients sent for others to have.

    Args:
        apart: by client, the tensors that `FedAvg.apart` names; a client that sent none is not in it.
    """

    apart: dict[str, Params] = field(default_factory=dict)


class Apart:
    """Takes what is not to be averaged out of every reply, and hands the rest on to the rule of combining.

    Args:
        algorithm: whose `apart` says which tensors these are.
        inner: combines everything else.
    """

    def __init__(self, algorithm: FedAvg, inner: LoraCombiner) -> None:
        self._algorithm, self._inner = algorithm, inner
        self._found: dict[str, Params] = {}

    def add(self, message: Message) -> None:
        """Takes one reply in; one without examples has nothing for others."""
        own = {name: message.extra[name] for name in self._algorithm.apart(message.extra)}
        if own and message.num_examples:
            self._found[message.client] = own
        rest = {name: tensor for name, tensor in message.extra.items() if name not in own}
        self._inner.add(replace(message, extra=rest))

    def fault(self) -> str:
        """Says why these replies make no update; empty if they do."""
        return self._inner.fault()

    def products(self) -> Params:
        """Gives the mean of the clients' LoRA products."""
        return self._inner.products()

    def result(self) -> Combined:
        """Gives the combined message, and beside it what came of single clients."""
        return Combined(**vars(self._inner.result()), apart=dict(self._found))

    def facts(self) -> dict[str, float]:
        """Gives what a round's row should say besides, by metric."""
        return self._inner.facts()
