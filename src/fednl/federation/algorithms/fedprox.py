"""FedProx: local steps are pulled back towards the rules that the server sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field

from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.section import Section

if TYPE_CHECKING:
    import torch

    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params


class FedProxSettings(Section):
    """The `[fedprox]` section.

    Args:
        mu: how strongly a client is pulled back to what the server sent, at least 0; 0 is FedAvg. No value
            suits all data: the paper tries 0.001, 0.01, 0.1, 0.5 and 1. Under plain gradient descent
            `training.local-lr` times mu above 2 would diverge; AdamW's steps are bounded whatever mu is.
    """

    mu: float = Field(default=0.01, ge=0, allow_inf_nan=False)


class FedProx(FedAvg):
    """Adds (mu / 2) |w - w_sent|^2 over the shared rules to every client's loss, so that clients drift less.

    w_sent stays fixed for the round. Rules that a client keeps to itself are not pulled. The pull is part of
    the gradient, so it passes through clipping and AdamW; the loss that is reported is the data's alone.
    Settings: `FedProxSettings`.

    Source: Li et al. 2020 (arXiv 1812.06127), eq. 2; AdamW in place of SGD is ours.
    """

    Settings: ClassVar[type[BaseModel]] = FedProxSettings
    traits: ClassVar[Traits] = Traits(one_client_is_local=False)

    def penalty(self, params: Params, received: Message, state: ClientState) -> torch.Tensor | float:
        """Gives (mu / 2) |w - w_sent|^2, summed over the shared rules that local steps move.

        Args:
            params: the rules now, as autograd leaves.
            received: the server's message; its params are w_sent.
            state: the client's state.
        """
        if self.settings.mu == 0:
            return 0.0
        pulled = [name for name in self.trainable(params) if name in received.params]
        half = float(self.settings.mu) / 2
        return half * sum((params[name] - received.params[name]).square().sum() for name in pulled)
