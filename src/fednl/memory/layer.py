"""The memory of one attention layer: what is written, what is read, and how much of it is heard.

Source: FedNL (arXiv 2605.16350) equations (3), (9), (14) for the memory; the low-rank projections, the write
strength per KV head and the gate per query head are ours where the paper is silent (docs/paper-map.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednl.memory.operator import delta_rule
from fednl.memory.precision import Spared
from fednl.memory.settings import MemoryConfig
from fednl.memory.window import WindowContext

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


class Projection(nn.Module):
    """What the memory path adds to the backbone's own q, k and v: `x -> (x down) up + shift`, zero at the start.

    The static attention path never sees it (that is what `lora` is for). Only q and k have a shift: a language
    model's keys share a large common part, which makes every key look like every other; `fednl.memory.centre`
    sets the shift to take it away.
    """

    def __init__(self, inputs: int, outputs: dict[str, int], rank: int, generator: torch.Generator) -> None:
        super().__init__()
        for name, size in outputs.items():
            down = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
            self.register_parameter(f"{name}_down", nn.Parameter(down))
            self.register_parameter(f"{name}_up", nn.Parameter(torch.zeros(size, rank)))
            if name != "v":
                self.register_parameter(f"{name}_shift", nn.Parameter(torch.zeros(size)))

    def forward(self, x: Tensor, name: str) -> Tensor:
        """`x [..., inputs]` -> `[..., outputs[name]]`, in `x`'s dtype."""
        down, up = getattr(self, f"{name}_down"), getattr(self, f"{name}_up")
        shift = getattr(self, f"{name}_shift", None)
        return F.linear(F.linear(x, down.to(x.dtype)), up.to(x.dtype), None if shift is None else shift.to(x.dtype))


class Written(NamedTuple):
    """What a memory holds of the tokens so far.

    Attributes:
        state: `[batch, kv_heads, head_dim, head_dim]`, float32.
        context: the addresses' running average with `keys = "context"`, `[batch, kv_heads, head_dim]`, else `None`.
        waiting: key, value and write strength of the tokens still in the window, with `write = "leaving"`,
            `[batch, slots, kv_heads, 2 * head_dim + 1]`, else `None`.
    """

    state: Tensor
    context: Tensor | None
    waiting: Tensor | None = None


class MemoryLayer(Spared):
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
        self.silu = config.feature == "silu"
        self.leaving = config.write == "leaving"
        self.write = Affine(hidden, kv_heads, bias=math.log(config.write_start / (1 - config.write_start)))
        start = math.log(GATE_AT_START / (1 - GATE_AT_START)) if self.convex else GATE_AT_START
        self.gate = Affine(hidden, heads, bias=start)
        sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        if config.keys == "context":  # addresses are asked for by addresses
            sizes = {"v": sizes["v"]}
        self.projection = Projection(hidden, sizes, config.rank, generator) if config.rank else None

    def forward(
        self,
        attended: Tensor,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        past: Written | None,
        window: WindowContext | None,
        gate_scale: float,
        addresses: Callable[[Tensor | None, Tensor | None], tuple[Tensor, Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Written]:
        """Writes the new tokens into the memory, reads it, and mixes the read into the attention's output.

        Args:
            attended: the frozen attention's output before `o_proj`, `[batch, tokens, heads * head_dim]`.
            hidden: the layer's input after its norm, `[batch, tokens, hidden]`.
            q, k, v: the backbone's own projections of it before rotary embedding, `[batch, tokens, ...]`.
            keep: `[batch, tokens]` bool, False for padding, which writes nothing; `None` if all is real.
            past: what earlier passes wrote, or `None` for an empty memory.
            window: the pass's window, or `None` under full attention.
            gate_scale: 1, or 0 to close the gate.
            addresses: with `keys = "context"`, gives queries, keys and the last average from `keep` and the average
                so far, as `Addresses` does.

        Everything is computed in float32 (float64 if the rules are), whatever the backbone's dtype and under autocast.

        Returns:
            The mixed output in `attended`'s dtype and shape, with a closed gate `attended` itself; and the memory
            after it. Nothing is changed in place.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            read, written = self._write_and_read(hidden, q, k, v, keep, past, window, addresses)
            return (attended if gate_scale == 0 else self._hear(attended, hidden, read, gate_scale)), written

    def _write_and_read(
        self,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        past: Written | None,
        window: WindowContext | None,
        addresses: Callable[[Tensor | None, Tensor | None], tuple[Tensor, Tensor, Tensor]] | None,
    ) -> tuple[Tensor, Written]:
        x = hidden.to(torch.promote_types(self.write.weight.dtype, torch.float32))
        beta = torch.sigmoid(self.write(x))
        if keep is not None:
            beta = beta * keep.unsqueeze(-1)
        if addresses is None:
            queries, keys, context = self._of_token(x, q, "q"), self._of_token(x, k, "k"), None
        else:
            queries, keys, context = addresses(keep, None if past is None else past.context)
        values = self._project(x, v, "v")
        waiting = None
        if window is not None and self.leaving:
            held = torch.cat([keys, values, beta.unsqueeze(-1)], -1)
            if past is not None and past.waiting is not None:
                held = torch.cat([past.waiting.to(held.dtype), held], 1)
            keys, values, last = window.leaving(held).split([self.head_dim, self.head_dim, 1], -1)
            beta, waiting = last.squeeze(-1), window.retain(held, 1)
        old = None if past is None else past.state
        read, state = delta_rule(queries, keys, values, beta, state=old, chunk_tokens=self.chunk_tokens)
        # Addresses are per KV head, and so is what they read; its query heads hear the same, each at its own gate.
        return read.repeat_interleave(self.heads // read.shape[2], dim=2), Written(state, context, waiting)

    def _hear(self, attended: Tensor, hidden: Tensor, read: Tensor, gate_scale: float) -> Tensor:
        """Mixes the read into the attention's output, as much as the gate says."""
        logits = self.gate(hidden.to(read.dtype))
        gate = (torch.sigmoid(logits) if self.convex else torch.tanh(logits)).unsqueeze(-1) * gate_scale
        static = attended.to(read.dtype).view(read.shape)
        mixed = (1 - gate) * static + gate * read if self.convex else static + gate * read
        return mixed.view(attended.shape).to(attended.dtype)

    def _of_token(self, x: Tensor, own: Tensor, name: str) -> Tensor:
        """Queries or keys of length 1 from the backbone's own projection."""
        projected = self._project(x, own, name)
        return unit(F.silu(projected) if self.silu else projected)

    def _project(self, x: Tensor, own: Tensor, name: str) -> Tensor:
        projected = own.to(x.dtype)
        if self.projection is not None:
            projected = projected + self.projection(x, name)
        return projected.view(*projected.shape[:2], -1, self.head_dim)


def unit(x: Tensor) -> Tensor:
    """Scales the last dimension to length 1; a zero vector stays zero (epsilon inside the root)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
