"""How much of a memory's read is heard: the group `gate`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednl.memory.settings import MemoryConfig
from fednl.memory.write import Affine, logit

GATE_AT_START = 0.1
NORM_EPSILON = 1e-6


class Gate(Affine):
    """A number per query head that the read is multiplied by, `tanh(W x + b)`; with convex mixing `sigmoid(W x + b)`.

    Without `gate = "input"` there is no W: `b` is one number per query head, or one for the layer. At the start W is 0
    and the number 0.1.

    Args:
        hidden: width of the residual stream.
        heads: query heads.
        head_dim: width of a head.
        config: the memory settings; with `read_norm` each head's read is first scaled to a root mean square of 1, times
            `norm`, one learned number per channel, the same for all heads.

    Source: "a learnable scalar or vector" in FedNL (arXiv 2605.16350) section 1.2; its forms are ours. RMS norm of the
    read as in Gated DeltaNet (arXiv 2412.06464) and TPTT (arXiv 2506.17671).
    """

    def __init__(self, hidden: int, heads: int, head_dim: int, config: MemoryConfig) -> None:
        convex = config.mixing == "convex"
        inputs, outputs = (hidden if config.gate == "input" else 0), (1 if config.gate == "layer" else heads)
        super().__init__(inputs, outputs, bias=logit(GATE_AT_START) if convex else GATE_AT_START)
        self.convex = convex
        self.norm = nn.Parameter(torch.ones(head_dim)) if config.read_norm else None

    def mix(self, attended: Tensor, hidden: Tensor, read: Tensor, scale: float) -> Tensor:
        """Mixes the read into the attention's output.

        Args:
            attended: `[batch, tokens, heads * head_dim]`.
            hidden: what the attention was given, `[batch, tokens, hidden]`.
            read: `[batch, tokens, heads, head_dim]`.
            scale: multiplies the gate.

        Returns:
            The mixture in `attended`'s dtype and shape; computed in `read`'s dtype.
        """
        logits = self(hidden.to(read.dtype))
        gate = (torch.sigmoid(logits) if self.convex else torch.tanh(logits)).unsqueeze(-1) * scale
        if self.norm is not None:
            read = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + NORM_EPSILON) * self.norm.to(read.dtype)
        static = attended.to(read.dtype).view(read.shape)
        mixed = (1 - gate) * static + gate * read if self.convex else static + gate * read
        return mixed.view(attended.shape).to(attended.dtype)
