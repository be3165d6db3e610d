"""Rules stay at least float32, whatever the backbone is cast to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class Spared(nn.Module):
    """Moves and casts as every module does, but never below float32: `model.to(bfloat16)` spares the rules."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def spare(tensor: Tensor) -> Tensor:
            cast = fn(tensor)
            narrowed = cast.is_floating_point() and cast.dtype.itemsize < 4 <= tensor.dtype.itemsize
            return tensor.to(cast.device) if narrowed else cast

        super()._apply(spare, recurse)  # type: ignore[no-untyped-call]
        return self
