"""The memory's own q, k and v: low-rank changes of the backbone's, and what they share with the tokens just before."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Module):
    """What the memory path adds to the backbone's own q, k and v: `x -> (x down) up + shift`, zero at the start.

    The static attention path never sees it (that is what `lora` is for). Only queries and keys have a shift: a language
    model's keys share a large common part, which makes every key look like every other; `fednl.memory.centre`
    sets the shift to take it away. `shifted` names those that have one.

    Args:
        inputs: width of the residual stream.
        outputs: width of every part by its name: q, k, v, and k2, v2, ... for further writes.
        rank: the inner size; 0 for no change and no shift.
        generator: draws `down`.
        convolution: what mixes the parts with those of the tokens before, or `None`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: dict[str, int],
        rank: int,
        generator: torch.Generator,
        convolution: Convolution | None = None,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.shifted = tuple(name for name in outputs if name[0] != "v") if rank else ()
        for name, size in outputs.items() if rank else ():
            down = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
            self.register_parameter(f"{name}_down", nn.Parameter(down))
            self.register_parameter(f"{name}_up", nn.Parameter(torch.zeros(size, rank)))
            if name in self.shifted:
                self.register_parameter(f"{name}_shift", nn.Parameter(torch.zeros(size)))
        self.convolution = convolution

    def forward(self, x: Tensor, name: str) -> Tensor:
        """`x [..., inputs]` -> `[..., outputs[name]]`, in `x`'s dtype."""
        down, up = getattr(self, f"{name}_down"), getattr(self, f"{name}_up")
        shift = getattr(self, f"{name}_shift", None)
        return F.linear(F.linear(x, down.to(x.dtype)), up.to(x.dtype), None if shift is None else shift.to(x.dtype))


class Convolution(nn.Module):
    """A short causal convolution over the real tokens of a row, channel by channel; at the start it changes nothing.

    `y_t = sum_j weight_j x_(t - tokens + 1 + j)`, where x is 0 before a row's first token and padding is no token.

    Args:
        sizes: channels by name; each name has a weight of its own, `[channels, tokens]`.
        tokens: how many tokens it reaches over, the one itself included; at least 2.

    Source: short convolutions on q, k and v as in Gated DeltaNet (arXiv 2412.06464), there followed by silu; starting
    from the identity is ours.
    """

    def __init__(self, sizes: dict[str, int], tokens: int) -> None:
        super().__init__()
        self.names, self.tokens = tuple(sizes), tokens
        for name, size in sizes.items():
            itself = torch.zeros(size, tokens)
            itself[:, -1] = 1
            self.register_parameter(name, nn.Parameter(itself))

    def forward(
        self, parts: dict[str, Tensor], keep: Tensor | None, carry: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Mixes every part with its last tokens.

        Args:
            parts: by name, `[batch, tokens, channels]`; those without a weight stay as they are.
            keep: `[batch, tokens]` bool, False for padding; `None` if all is real.
            carry: the last real tokens before these, `[batch, self.tokens - 1, all channels]`; `None` for none.

        Returns:
            The parts, and the last real tokens after these.
        """
        x = torch.cat([parts[name] for name in self.names], -1)
        weight = torch.cat([getattr(self, name) for name in self.names]).to(x.dtype)
        reach, given = self.tokens - 1, x.shape[1]
        before = x.new_zeros(x.shape[0], reach, x.shape[2]) if carry is None else carry.to(x.dtype)
        held = torch.cat([before, x], 1)
        if keep is not None:  # real tokens side by side, padding after them
            order = torch.argsort((~keep).int(), dim=1, stable=True).unsqueeze(-1)
            held = torch.cat([before, x.gather(1, order.expand_as(x))], 1)
        mixed = sum((held[:, j : j + given] * weight[:, j] for j in range(self.tokens)), torch.zeros_like(x))
        if keep is None:
            last = held[:, given:].clone()  # a view would keep the whole pass alive in the cache
        else:
            rank = (keep.cumsum(1) - 1).clamp(min=0).unsqueeze(-1)
            mixed = mixed.gather(1, rank.expand_as(x))
            places = keep.sum(1, keepdim=True) + torch.arange(reach, device=x.device)
            last = held.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[2]))
        sizes = [parts[name].shape[-1] for name in self.names]
        return parts | dict(zip(self.names, mixed.split(sizes, -1), strict=True)), last
