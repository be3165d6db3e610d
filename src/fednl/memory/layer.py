"""The memory of one attention layer: what is written, what is read, and how much of it is heard.

Source: FedNL (arXiv 2605.16350) equations (3), (9), (14) for the memory; the low-rank projections, the write
strength per KV head and the gate per query head are ours where the paper is silent (docs/paper-map.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednl.memory.precision import Spared
from fednl.memory.settings import MemoryConfig
from fednl.memory.update_rules import function
from fednl.memory.window import WindowContext
from fednl.memory.write import Affine, Strengths, Write, logit

GATE_AT_START = 0.1
NORM_EPSILON = 1e-6


class Projection(nn.Module):
    """What the memory path adds to the backbone's own q, k and v: `x -> (x down) up + shift`, zero at the start.

    The static attention path never sees it (that is what `lora` is for). Only queries and keys have a shift: a language
    model's keys share a large common part, which makes every key look like every other; `fednl.memory.centre`
    sets the shift to take it away. `shifted` names those that have one.
    """

    def __init__(self, inputs: int, outputs: dict[str, int], rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.shifted = tuple(name for name in outputs if name[0] != "v")
        for name, size in outputs.items():
            down = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
            self.register_parameter(f"{name}_down", nn.Parameter(down))
            self.register_parameter(f"{name}_up", nn.Parameter(torch.zeros(size, rank)))
            if name in self.shifted:
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
            `[batch, slots, writes * kv_heads, 2 * head_dim + 1]`, and the rule's further strengths; else `None`.
        momentum: the state's momentum, as `state`, with a rule that has one, else `None`.
    """

    state: Tensor
    context: Tensor | None
    waiting: Tensor | None = None
    momentum: Tensor | None = None


class MemoryLayer(Spared):
    """The trainable rules of one layer and the memory they drive; the only child that `attach_memory` adds.

    Args:
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key/value heads; state and write strength belong to these.
        head_dim: width of a head.
        config: the memory settings.
        generator: draws the low-rank projections.

    Its parameters are the rules, by group: `write` (write strength, decay, momentum), `gate`, `projection`.
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
        self.rule, self.writes = config.update_rule, config.writes
        self.write = Write(hidden, kv_heads, config)
        start = logit(GATE_AT_START) if self.convex else GATE_AT_START
        self.gate = Affine(hidden, heads, bias=start)
        sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        if config.keys == "context":  # addresses are asked for by addresses
            sizes = {"v": sizes["v"]}
        self.further = [str(number) for number in range(2, self.writes + 1)]
        for name in self.further:
            sizes |= {f"k{name}": kv_heads * head_dim, f"v{name}": kv_heads * head_dim}
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
            hidden: what the attention is given: the layer's input after its norm, if it has one there,
                `[batch, tokens, hidden]`.
            q, k, v: the backbone's own projections of it, after its own norm of q and k if it has one and before
                rotary embedding, `[batch, tokens, ...]`.
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
        strengths = self.write.strengths(x, keep)
        if addresses is None:
            queries, keys, context = self._of_token(x, q, "q"), self._of_token(x, k, "k"), None
        else:
            queries, keys, context = addresses(keep, None if past is None else past.context)
        values = self._project(x, v, "v")
        if self.further:
            own = k if addresses is None else None
            keys = torch.cat([keys, *(self._further_keys(x, own, keys, name) for name in self.further)], 2)
            values = torch.cat([values, *(self._project(x, v, f"v{name}") for name in self.further)], 2)
        waiting = None
        if window is not None and self.leaving:
            held = torch.cat([keys, values, *(s.unsqueeze(-1) for s in strengths if s is not None)], -1)
            if past is not None and past.waiting is not None:
                held = torch.cat([past.waiting.to(held.dtype), held], 1)
            columns = held.shape[-1] - 2 * self.head_dim
            keys, values, *parts = window.leaving(held).split([self.head_dim, self.head_dim, *[1] * columns], -1)
            leaving = iter(part.squeeze(-1) for part in parts)
            strengths = Strengths._make(None if s is None else next(leaving) for s in strengths)
            waiting = window.retain(held, 1)
        read, state, momentum = self._update(queries, keys, values, strengths, past)
        # Addresses are per KV head, and so is what they read; its query heads hear the same, each at its own gate.
        read = read.repeat_interleave(self.heads // read.shape[2], dim=2)
        return read, Written(state, context, waiting, momentum)

    def _update(
        self, queries: Tensor, keys: Tensor, values: Tensor, strengths: Strengths, past: Written | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Runs the update rule: what is read, and state and momentum after it."""
        given: dict[str, Any] = {"state": None if past is None else past.state, "chunk_tokens": self.chunk_tokens}
        written = (keys, values, strengths.beta)
        if self.rule.several:
            written = tuple(part.unflatten(2, (self.writes, self.kv_heads)) for part in written)
        if strengths.log_decay is not None:
            given["log_decay"] = strengths.log_decay[..., : self.kv_heads]
        if strengths.log_momentum is not None and strengths.real is not None:
            given |= {"log_momentum": strengths.log_momentum, "keep": strengths.real[..., 0] > 0}
            given["momentum"] = None if past is None else past.momentum
        read, state, *momentum = function(self.rule.fast)(queries, *written, **given)
        return read, state, momentum[0] if momentum else None

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

    def _further_keys(self, x: Tensor, own: Tensor | None, keys: Tensor, name: str) -> Tensor:
        """Keys of a token's further write: from its own k, or its address with a change; of length 1 at most."""
        if own is not None:
            return self._of_token(x, own, f"k{name}")
        turned = self._project(x, keys.flatten(2), f"k{name}")
        return turned * turned.square().sum(-1, keepdim=True).clamp(min=1.0).rsqrt()

    def _project(self, x: Tensor, own: Tensor, name: str) -> Tensor:
        projected = own.to(x.dtype)
        if self.projection is not None:
            projected = projected + self.projection(x, name)
        return projected.view(*projected.shape[:2], -1, self.head_dim)


def unit(x: Tensor) -> Tensor:
    """Scales the last dimension to length 1; a zero vector stays zero (epsilon inside the root)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
