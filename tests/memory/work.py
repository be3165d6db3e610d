"""Counts what torch does, so that a test can say how work grows without a clock."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Work(TorchDispatchMode):
    """Counts operations and the numbers in their results, and those of the largest one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.numbers = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        if isinstance(result, Tensor) and not func.is_view:
            self.numbers += result.numel()
            self.largest = max(self.largest, result.numel())
        return result
