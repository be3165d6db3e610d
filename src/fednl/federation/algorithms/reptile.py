"""Reptile: the server goes a part of the way to the clients' mean, for rules that adapt fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field

from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.section import Section

if TYPE_CHECKING:
    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params


class ReptileSettings(Section):
    """The `[reptile]` section.

    Args:
        outer_lr: the part of the way that the server goes, above 0 and at most 1; 1 is FedAvg.
    """

    outer_lr: float = Field(default=0.5, gt=0, le=1)


class Reptile(FedAvg):
    """Takes w = w + outer_lr (mean - w) on the server; clients train as with FedAvg.

    A start that is close to every client's optimum, from which a few local steps on a new client's data go
    far; those steps are the user's to take. Same steps as FedAvgM without momentum.
    Settings: `ReptileSettings`.

    Source: Nichol, Achiam and Schulman 2018 (arXiv 1803.02999), Algorithm 2. Ours: clients weigh by examples, the
    outer step stays the same over the run (there it falls to 0), and its default.
    """

    Settings: ClassVar[type[BaseModel]] = ReptileSettings
    traits: ClassVar[Traits] = Traits(one_client_is_local=False, identical_clients_unchanged=False)

    def server_step(self, params: Params, combined: Message, server_state: ClientState) -> tuple[Params, ClientState]:
        """Goes towards the mean, in float64; without a state.

        Args:
            params: the shared rules that were sent out.
            combined: the combined replies.
            server_state: empty.
        """
        import torch

        rate = self.settings.outer_lr
        # lerp gives its end to the bit at rate 1.
        return {
            name: torch.lerp(params[name].double(), mean.double(), rate).to(mean.dtype)
            for name, mean in combined.params.items()
        }, server_state
