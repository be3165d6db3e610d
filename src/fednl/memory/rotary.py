"""Rotary embeddings as the window applies them: to queries, keys and sinks at positions of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """How one rotary embedding turns the re-based queries and the sinks: for each what `turning` gives."""

    query: tuple[Tensor, Tensor]
    sink: tuple[Tensor, Tensor]


def turning(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A rotary embedding `[batch, tokens, dim]` as `rotate` takes it: for all heads, the first half of `sin` negative.

    That is worked out once for all layers, so that each has an operation less to do.
    """
    first, second = sin.unsqueeze(1).chunk(2, -1)
    return cos.unsqueeze(1), torch.cat([-first, second], -1)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Applies a rotary embedding (half-split layout), `turning`, to `x [batch, heads, tokens, head_dim]`.

    An embedding narrower than a head turns the head's first numbers only.
    """
    cos, sin = rotation
    if cos.shape[-1] < x.shape[-1]:
        turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
        return torch.cat([rotate(turned, rotation), kept], -1)
    return x * cos + x.roll(cos.shape[-1] // 2, -1) * sin
