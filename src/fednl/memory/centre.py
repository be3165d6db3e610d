"""Takes away what all keys have in common, so that the memory can tell them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fednl.errors import BackboneError
from fednl.memory.attach import closed
from fednl.memory.layer_hooks import Site
from fednl.memory.sites import attachment, by_token, sources

LARGEST_SCALE = 1e3


def centre(model: nn.Module, input_ids: Tensor) -> None:
    """Takes what all keys have in common over a text out of them: out of each layer's q and k, or of the addresses.

    A language model's keys share a large common part: before rotary embedding, two keys of SmolLM2-135M have a
    cosine of 0.5 to 0.8 whatever their tokens. Each write then erases much of every other. Without the common
    part the mean cosine is about 0.05, and what was written stays until it is written again.

    Args:
        model: a model with memory attached; only the shifts, or the addresses' centre and scale, are changed.
        input_ids: any text that may be public, `[batch, tokens]` int64; some hundred tokens are enough, and one token
            over and over is not: all that it has is common.

    Raises:
        BackboneError: no memory is attached, it has no projection to hold a shift, or the text is one token.

    Source: ours (docs/log.md has the measurement).
    """
    owner = attachment(model)
    if input_ids.unique().numel() < 2:
        raise BackboneError("The text to centre on is one token, over and over; give some hundred tokens of any text.")
    # By the numbers that the layers had on attaching: some may have been taken out since.
    attention: dict[int, Any] = {site.index: site.attention for site in owner.handles if isinstance(site, Site)}
    addresses = owner.addresses
    if addresses is not None and owner.address_layer is not None:
        # What k_proj is given is its layer's input after the norm, which is what addresses are made of.
        site = attention[owner.address_layer].k_proj
        x = _seen(model, input_ids, [site], None)[0]
        with torch.no_grad():
            addresses.centre.copy_(x.mean(0))
            addresses.scale.fill_((x - x.mean(0)).square().mean().rsqrt().clamp(max=LARGEST_SCALE))
        return
    shifts, sites = [], []
    decoder: Any = owner.decoder
    family: str = decoder.config.model_type
    source = sources(family)
    for index, memory in owner.layers.items():
        if memory.projection is None or not memory.projection.rank:
            raise BackboneError("memory.rank is 0, so there is no projection to centre; set memory.rank to at least 1.")
        for name in memory.projection.shifted:
            shifts.append(getattr(memory.projection, f"{name}_shift"))
            sites.append(getattr(attention[index], source[name[0]]))
    with torch.no_grad():
        for shift, keys in zip(shifts, _seen(model, input_ids, sites, family), strict=True):
            shift.copy_(-keys.mean(0))


def _seen(model: nn.Module, input_ids: Tensor, sites: list[nn.Module], family: str | None) -> list[Tensor]:
    """What each source of a family gives, or without one is given, in a pass with closed gates: `[tokens, width]`."""
    found: dict[nn.Module, Tensor] = {}

    def remember(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        rows = (args[0] if family is None else by_token(output, family)).flatten(0, -2)
        found[module] = rows.to(torch.promote_types(rows.dtype, torch.float32))

    handles = [site.register_forward_hook(remember) for site in sites]
    try:
        with torch.no_grad(), closed(model):
            model(input_ids, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return [found[site] for site in sites]
