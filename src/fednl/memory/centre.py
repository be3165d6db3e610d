"""Takes away what all keys have in common, so that the memory can tell them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fednl.errors import BackboneError
from fednl.memory.attach import closed
from fednl.memory.layer import MemoryLayer
from fednl.memory.sites import attachment


def centre(model: nn.Module, input_ids: Tensor) -> None:
    """Sets every memory layer's shift of q and k to minus their mean over a text.

    A language model's keys share a large common part: before rotary embedding, two keys of SmolLM2-135M have a
    cosine of 0.5 to 0.8 whatever their tokens. Each write then erases much of every other. Without the common
    part the mean cosine is about 0.05, and what was written stays until it is written again.

    Args:
        model: a model with memory attached; only the shifts are changed.
        input_ids: any text that may be public, `[batch, tokens]` int64; some hundred tokens are enough.

    Raises:
        BackboneError: no memory is attached, or it has no projection to hold a shift.

    Source: ours (docs/log.md has the measurement).
    """
    owner = attachment(model)
    blocks: Any = owner.decoder.layers
    means: dict[tuple[int, str], Tensor] = {}
    handles = []
    for index, memory in owner.layers.items():
        if memory.projection is None:
            raise BackboneError("memory.rank is 0, so there is no projection to centre; set memory.rank to at least 1.")
        for name in ("k",) if memory.from_context else ("q", "k"):
            site = getattr(blocks[index].self_attn, f"{name}_proj")
            handles.append(site.register_forward_hook(_remember(means, (index, name))))
    try:
        with torch.no_grad(), closed(model):
            model(input_ids, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        for (index, name), mean in means.items():
            _shift(owner.layers[index], name).copy_(-mean)


def _remember(means: dict[tuple[int, str], Tensor], key: tuple[int, str]) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        means[key] = output.to(torch.promote_types(output.dtype, torch.float32)).mean((0, 1))

    return hook


def _shift(memory: MemoryLayer, name: str) -> Tensor:
    shift: Tensor = getattr(memory.projection, f"{name}_shift")
    return shift
