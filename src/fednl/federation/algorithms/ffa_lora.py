"""FFA-LoRA: the A factors stay as they were drawn, the B factors are trained and averaged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from fednl.federation.algorithms.fedavg import FedAvg, Traits


class FfaLora(FedAvg):
    """Freezes every LoRA A, so that averaging B averages the update: mean(B_k) A = mean(B_k A).

    With A and B both averaged, the mean of the products is not the product of the means. A is the one drawn
    from the run's seed, the same on every client, and never travels: LoRA's bytes halve where A and B are of one
    size. Rules that are no LoRA factor are trained and shared as FedAvg does. Without a LoRA nothing would differ from
    FedAvg, so settings with `lora.rank = 0`, or whose `shared` lets no B out, are refused.

    Source: Sun et al. 2024 (arXiv 2403.12313), section 3.
    """

    traits: ClassVar[Traits] = Traits(needs_lora=True)

    def shared(self, names: Iterable[str]) -> list[str]:
        """Lists the names that travel, sorted: what the setting lets out, without any A.

        Args:
            names: canonical names of all that is trained.
        """
        return _moving(super().shared(names))

    def trainable(self, names: Iterable[str]) -> list[str]:
        """Lists the names that local steps move, sorted: all but any A.

        Args:
            names: canonical names of all that is trained.
        """
        return _moving(super().trainable(names))


def _moving(names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(".lora_A")]
