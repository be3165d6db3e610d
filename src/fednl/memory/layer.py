"""The memory of one attention layer: what is written, what is read, and how much of it is heard.

Source: FedNL (arXiv 2605.16350) equations (3), (9), (14) for the memory; the low-rank projections, the write
strength per KV head and the gate per query head are ours where the paper is silent (docs/paper-map.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fednl.memory.arguments import autocast_off
from fednl.memory.gate import Gate
from fednl.memory.precision import Spared
from fednl.memory.projection import Convolution, Projection
from fednl.memory.settings import MemoryConfig
from fednl.memory.update_rules import function
from fednl.memory.window import WindowContext
from fednl.memory.write import Inner, Strengths, Write

NORM_EPSILON = 1e-6


class Written(NamedTuple):
    """What a memory holds of the tokens so far.

    Attributes:
        state: `[batch, kv_heads, head_dim, head_dim]`, float32; with an inner model one row more, for its bias.
        context: the addresses' running average with `keys = "context"`, `[batch, kv_heads, head_dim]`, else `None`.
        waiting: key, value and write strength of the tokens still in the window, with `write = "leaving"`,
            `[batch, slots, writes * kv_heads, 2 * head_dim + 1]`, and the rule's further strengths; else `None`.
        momentum: the state's momentum, as `state`, with a rule that has one, else `None`.
        recent: what the last tokens gave the convolution, `[batch, conv_tokens - 1, channels]`, else `None`.
        gathered: the mini-batch so far, as `state`, with a rule that has an inner model, else `None`.
        taken: how many of its tokens came, `[batch]` int64, else `None`.
    """

    state: Tensor
    context: Tensor | None
    waiting: Tensor | None = None
    momentum: Tensor | None = None
    recent: Tensor | None = None
    gathered: Tensor | None = None
    taken: Tensor | None = None


class MemoryLayer(Spared):
    """The trainable rules of one layer and the memory they drive; the only child that `attach_memory` adds.

    Args:
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key/value heads; state and write strength belong to these.
        head_dim: width of a head.
        config: the memory settings.
        generator: draws the low-rank projections, those of the write strength included.

    Its parameters are the rules, by group: `write` (write strength, decay, momentum), `gate`, `projection`.
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, config: MemoryConfig, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.chunk_tokens, self.mini_batch_tokens = config.chunk_tokens, config.mini_batch_tokens
        self.silu = config.feature == "silu"
        self.leaving = config.write == "leaving"
        self.rule, self.writes = config.update_rule, config.writes
        inner = Inner(kv_heads, head_dim, generator) if self.rule.inner else None
        self.write = Write(hidden, kv_heads, config, inner, generator)
        self.gate = Gate(hidden, heads, head_dim, config)
        sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        if config.keys == "context":  # addresses are asked for by addresses
            sizes = {"v": sizes["v"]}
        self.further = [str(number) for number in range(2, self.writes + 1)]
        for name in self.further:
            sizes |= {f"k{name}": kv_heads * head_dim, f"v{name}": kv_heads * head_dim}
        # What is made of the backbone's own q, k and v; with addresses, further keys are made of these.
        own = sizes if config.keys == "token" else {name: size for name, size in sizes.items() if name[0] == "v"}
        self.own = tuple(own)
        convolution = Convolution(own, config.conv_tokens) if config.conv_tokens else None
        projects = bool(config.rank or convolution)
        self.projection = Projection(hidden, sizes, config.rank, generator, convolution) if projects else None

    def convolved(self) -> list[Tensor]:
        """The convolution's weights, `[channels, conv_tokens]` each; empty without one."""
        convolution = None if self.projection is None else self.projection.convolution
        return [] if convolution is None else list(convolution.parameters())

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
        with autocast_off(hidden.device):
            read, written = self._write_and_read(hidden, q, k, v, keep, past, window, addresses)
            return (attended if gate_scale == 0 else self.gate.mix(attended, hidden, read, gate_scale)), written

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
        x = hidden.to(torch.promote_types(self.write.bias.dtype, torch.float32))
        strengths = self.write.strengths(x, keep)
        parts, recent = self._projected(x, {"q": q, "k": k, "v": v}, keep, None if past is None else past.recent)
        if addresses is None:
            queries, keys, context = self._directed(parts["q"]), self._directed(parts["k"]), None
        else:
            queries, keys, context = addresses(keep, None if past is None else past.context)
        values = parts["v"]
        if self.further:
            keys = torch.cat([keys, *(self._further_keys(x, parts, keys, f"k{name}") for name in self.further)], 2)
            values = torch.cat([values, *(parts[f"v{name}"] for name in self.further)], 2)
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
        read, written = self._update(queries, keys, values, strengths, past)
        # Addresses are per KV head, and so is what they read; its query heads hear the same, each at its own gate.
        read = read.repeat_interleave(self.heads // read.shape[2], dim=2)
        return read, Written(context=context, waiting=waiting, recent=recent, **written)

    def _update(
        self, queries: Tensor, keys: Tensor, values: Tensor, strengths: Strengths, past: Written | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Runs the update rule: what is read, and what it carries on, by the name in `Written`."""
        given: dict[str, Any] = {}
        carried = ["state"]
        written = (keys, values, strengths.beta)
        if self.rule.several:
            written = tuple(part.unflatten(2, (self.writes, self.kv_heads)) for part in written)
        if strengths.log_decay is not None:
            given["log_decay"] = strengths.log_decay[..., : self.kv_heads]
        if strengths.real is not None:
            given["keep"] = strengths.real[..., 0] > 0
        if strengths.log_momentum is not None:
            given["log_momentum"] = strengths.log_momentum
            carried += ["momentum"]
        if self.write.inner is not None:
            written = (keys, values, strengths.beta / self.head_dim)
            given |= {"batch_tokens": self.mini_batch_tokens, **dict(self.write.inner.named_parameters())}
            carried += ["gathered", "taken"]
        else:
            given["chunk_tokens"] = self.chunk_tokens
        given |= {name: None if past is None else getattr(past, name) for name in carried}
        read, *after = function(self.rule.fast)(queries, *written, **given)
        return read, dict(zip(carried, after, strict=True))

    def _projected(
        self, x: Tensor, own: dict[str, Tensor], keep: Tensor | None, recent: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """What is made of the backbone's own q, k and v, `[batch, tokens, heads, head_dim]` by name."""
        parts = {name: self._changed(x, own[name[0]].to(x.dtype), name) for name in self.own}
        if self.projection is not None and self.projection.convolution is not None:
            parts, recent = self.projection.convolution(parts, keep, recent)
        return {name: part.view(*part.shape[:2], -1, self.head_dim) for name, part in parts.items()}, recent

    def _changed(self, x: Tensor, part: Tensor, name: str) -> Tensor:
        """`[batch, tokens, heads * head_dim]` with its low-rank change."""
        return part if self.projection is None or not self.projection.rank else part + self.projection(x, name)

    def _directed(self, part: Tensor) -> Tensor:
        """Queries or keys of length 1."""
        return unit(F.silu(part) if self.silu else part)

    def _further_keys(self, x: Tensor, parts: dict[str, Tensor], keys: Tensor, name: str) -> Tensor:
        """Keys of a token's further write: from its own k, or its address with a change; of length 1 at most."""
        if name in parts:
            return self._directed(parts[name])
        turned = self._changed(x, keys.flatten(2), name).view(keys.shape)
        return turned * turned.square().sum(-1, keepdim=True).clamp(min=1.0).rsqrt()


def unit(x: Tensor) -> Tensor:
    """Scales the last dimension to length 1; a zero vector stays zero (epsilon inside the root)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
