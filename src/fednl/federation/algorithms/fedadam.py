"""FedAdam: the server takes Adam steps on the clients' mean change."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field, field_validator

from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.section import Section

if TYPE_CHECKING:
    import torch

    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params


class FedAdamSettings(Section):
    """The `[fedadam]` section.

    Args:
        server_lr: step size; roughly how far an element moves in a round.
        betas: decay of the first and of the second moment, each from 0 to below 1.
        tau: added to the root of the second moment, above 0; larger makes the steps less adaptive.
    """

    server_lr: float = Field(default=1e-2, gt=0, allow_inf_nan=False)
    # Not strict: TOML and JSON know lists, and a frozen section holds a tuple.
    betas: tuple[float, float] = Field(default=(0.9, 0.99), strict=False)
    tau: float = Field(default=1e-3, gt=0, allow_inf_nan=False)

    @field_validator("betas")
    @classmethod
    def _decays(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("write two numbers from 0 to below 1")
        return value


class FedAdam(FedAvg):
    """Treats the clients' mean change as a gradient for Adam on the server, without bias correction.

    m = b1 m + (1 - b1) d, v = b2 v + (1 - b2) d^2 and w = w + server_lr m / (sqrt(v) + tau), where d is the
    mean of the clients' models minus the global one; m starts at 0, v at tau^2. Settings: `FedAdamSettings`.

    Source: Reddi et al. 2021 (arXiv 2003.00295), Algorithm 2; the default server_lr is ours.
    """

    Settings: ClassVar[type[BaseModel]] = FedAdamSettings
    traits: ClassVar[Traits] = Traits(one_client_is_local=False, identical_clients_unchanged=False)

    def server_step(self, params: Params, combined: Message, server_state: ClientState) -> tuple[Params, ClientState]:
        """Takes one Adam step, in float64; the state is `first/NAME` and `second/NAME`.

        Args:
            params: the shared rules that were sent out.
            combined: the combined replies.
            server_state: the moments from the round before; empty at first.
        """
        rate, tau = self.settings.server_lr, self.settings.tau
        first_decay = self.settings.betas[0]
        new: Params = {}
        state: ClientState = {}
        for name, mean in combined.params.items():
            change = mean.double() - params[name].double()
            first = server_state.get(f"first/{name}", change * 0)
            second = server_state.get(f"second/{name}", change * 0 + tau**2)
            first = first_decay * first + (1 - first_decay) * change
            second = self.second_moment(second, change.square())
            new[name] = (params[name].double() + rate * first / (second.sqrt() + tau)).to(mean.dtype)
            state |= {f"first/{name}": first, f"second/{name}": second}
        return new, state

    def second_moment(self, before: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """Gives the new second moment from the old one and the square of the change.

        Args:
            before: v of the round before, float64.
            square: d^2, of the same shape.
        """
        decay = float(self.settings.betas[1])
        return decay * before + (1 - decay) * square
