"""FedYogi: FedAdam whose second moment forgets slowly."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel

from fednl.federation.algorithms.fedadam import FedAdam, FedAdamSettings

if TYPE_CHECKING:
    import torch


class FedYogiSettings(FedAdamSettings):
    """The `[fedyogi]` section; its keys mean what they mean in `[fedadam]`.

    Args:
        server_lr: step size; roughly how far an element moves in a round.
        betas: decay of the first and of the second moment, each from 0 to below 1.
        tau: added to the root of the second moment, above 0; larger makes the steps less adaptive.
    """


class FedYogi(FedAdam):
    """As FedAdam, but v changes by (1 - b2) d^2 at most, so that after large changes small ones do not explode.

    v = v - (1 - b2) d^2 sign(v - d^2): FedAdam forgets a large d^2 by a part of v each round, FedYogi by a part
    of the new, small d^2. Settings: `FedYogiSettings`.

    Source: Reddi et al. 2021 (arXiv 2003.00295), Algorithm 2; the default server_lr is ours.
    """

    Settings: ClassVar[type[BaseModel]] = FedYogiSettings

    def second_moment(self, before: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """Gives v - (1 - b2) d^2 sign(v - d^2), which stays positive.

        Args:
            before: v of the round before, float64.
            square: d^2, of the same shape.
        """
        gain = 1 - float(self.settings.betas[1])
        return before - gain * square * (before - square).sign()
