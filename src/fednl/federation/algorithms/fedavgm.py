"""FedAvgM: FedAvg with momentum on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field

from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.section import Section

if TYPE_CHECKING:
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params


class FedAvgMSettings(Section):
    """The `[fedavgm]` section.

    Args:
        server_lr: step size on the pseudo-gradient (global minus mean); 1 with momentum 0 is FedAvg.
        momentum: how much of the last round's step is kept, from 0 to below 1.
    """

    server_lr: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.9, ge=0, lt=1)


class FedAvgM(FedAvg):
    """Averages as FedAvg does, and lets the server's steps gather momentum.

    v = momentum v + d and w = w - server_lr v, where d is the global model minus the mean of the clients'.
    Settings: `FedAvgMSettings`.

    Source: Hsu, Qi and Brown 2019 (arXiv 1909.06335), section 4.
    """

    Settings: ClassVar[type[BaseModel]] = FedAvgMSettings
    traits: ClassVar[Traits] = Traits(one_client_is_local=False, identical_clients_unchanged=False)

    def server_step(self, params: Params, combined: Message, server_state: ClientState) -> tuple[Params, ClientState]:
        """Steps along the pseudo-gradient with momentum, in float64; the state is `momentum/NAME`.

        Args:
            params: the shared rules that were sent out.
            combined: the combined replies.
            server_state: `momentum/NAME` from the round before; empty at first.
        """
        rate, momentum = self.settings.server_lr, self.settings.momentum
        new: Params = {}
        state: ClientState = {}
        for name, mean in combined.params.items():
            drift = params[name].double() - mean.double()
            kept = server_state.get(f"momentum/{name}", drift * 0) * momentum
            # Equal to params - rate (kept + drift); written from the mean, so that rate 1 and momentum 0
            # give the mean to the bit, as params - (params - mean) would not.
            new[name] = (mean.double() + (1 - rate) * drift - rate * kept).to(mean.dtype)
            state[f"momentum/{name}"] = kept + drift
        return new, state
