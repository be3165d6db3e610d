"""What `torch.compile` leaves alone.

A compiled model with memory runs the backbone's own layers compiled and everything of the memory as it is: its hooks
pass objects along, look at numbers, and differ from layer to layer, and would be compiled anew again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function, with all that it calls, as not to be compiled; outside `torch.compile` it is as before."""
    left_alone: Callable[P, R] = torch.compiler.disable(function)
    return left_alone
