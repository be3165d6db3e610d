"""The memory of one attention layer: what is written, what is read, and how much of it is heard.

Source: FedNL (arXiv 2605.16350) equations (3), (9), (14) for the memory; the low-rank projections, the write
strength per KV head and the gate per query head are ours where the paper is silent (docs/paper-map.md).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednl.memory.operator import delta_rule
from fednl.memory.settings import MemoryConfig

GATE_AT_START = 0.1
NORM_EPSILON = 1e-6


class Affine(nn.Module):
    """`weight x + bias`. Not an `nn.Linear`, so that PEFT's "all-linear" does not wrap a rule."""

    def __init__(self, inputs: int, outputs: int, bias: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = nn.Parameter(torch.full((outputs,), bias))

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., inputs]` -> `[..., outputs]`, in `x`'s dtype."""
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class LowRank(nn.Module):
    """What the memory path adds to the backbone's own q, k and v: `x -> (x down) up`, zero at the start.

    The static attention path never sees it (that is what `lora` is for).
    """

    def __init__(self, inputs: int, outputs: dict[str, int], rank: int, generator: torch.Generator) -> None:
        super().__init__()
        for name, size in outputs.items():
            down = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
            self.register_parameter(f"{name}_down", nn.Parameter(down))
            self.register_parameter(f"{name}_up", nn.Parameter(torch.zeros(size, rank)))

    def forward(self, x: Tensor, name: str) -> Tensor:
        """`x [..., inputs]` -> `[..., outputs[name]]`, in `x`'s dtype."""
        down, up = getattr(self, f"{name}_down"), getattr(self, f"{name}_up")
        return F.linear(F.linear(x, down.to(x.dtype)), up.to(x.dtype))


class MemoryLayer(nn.Module):
    """The trainable rules of one layer and the memory they drive; the only child that `attach_memory` adds.

    Args:
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key/value heads; state and write strength belong to these.
        head_dim: width of a head.
        config: the memory settings.
        generator: draws the low-rank projections.

    Its parameters are the rules, by group: `write` (write strength), `gate`, `projection`.
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, config: MemoryConfig, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.convex = config.mixing == "convex"
        self.chunk_tokens = config.chunk_tokens
        self.write = Affine(hidden, kv_heads, bias=0.0)
        start = math.log(GATE_AT_START / (1 - GATE_AT_START)) if self.convex else GATE_AT_START
        self.gate = Affine(hidden, heads, bias=start)
        sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        self.projection = LowRank(hidden, sizes, config.rank, generator) if config.rank else None

    def forward(
        self,
        attended: Tensor,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        state: Tensor | None,
        gate_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Writes the new tokens into the memory, reads it, and mixes the read into the attention's output.

        Args:
            attended: the frozen attention's output before `o_proj`, `[batch, tokens, heads * head_dim]`.
            hidden: the layer's input after its norm, `[batch, tokens, hidden]`.
            q, k, v: the backbone's own projections of it before rotary embedding, `[batch, tokens, ...]`.
            keep: `[batch, tokens]` bool, False for padding, which writes nothing; `None` if all is real.
            state: the memory so far, `[batch, kv_heads, head_dim, head_dim]` float32, or `None` for zero.
            gate_scale: 1, or 0 to close the gate.

        Everything is computed in float32 (float64 if the rules are), whatever the backbone's dtype.

        Returns:
            The mixed output in `attended`'s dtype and shape, and the new state. Nothing is changed in place.
        """
        x = hidden.to(torch.promote_types(self.write.weight.dtype, torch.float32))
        beta = torch.sigmoid(self.write(x))
        if keep is not None:
            beta = beta * keep.unsqueeze(-1)
        read, state = delta_rule(
            unit(F.silu(self._project(x, q, "q"))),
            unit(F.silu(self._project(x, k, "k"))),
            self._project(x, v, "v"),
            beta,
            state=state,
            chunk_tokens=self.chunk_tokens,
        )
        logits = self.gate(x)
        gate = (torch.sigmoid(logits) if self.convex else torch.tanh(logits)).unsqueeze(-1) * gate_scale
        static = attended.to(read.dtype).view(read.shape)
        mixed = (1 - gate) * static + gate * read if self.convex else static + gate * read
        return mixed.view(attended.shape).to(attended.dtype), state

    def _project(self, x: Tensor, own: Tensor, name: str) -> Tensor:
        projected = own.to(x.dtype)
        if self.projection is not None:
            projected = projected + self.projection(x, name)
        return projected.view(*projected.shape[:2], -1, self.head_dim)


def unit(x: Tensor) -> Tensor:
    """Scales the last dimension to length 1; a zero vector stays zero (epsilon inside the root)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
